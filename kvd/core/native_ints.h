/* Python integers as words, without a call for each. Cython cannot look inside an int; the layout differs by release. */
#ifndef KVD_NATIVE_INTS_H
#define KVD_NATIVE_INTS_H

#include <Python.h>
#include <stdint.h>

/* An int of 0 to 2^64-1. Returns 0, or -1 with an exception set (OverflowError, TypeError). */
static inline int kvd_u64(PyObject *value, uint64_t *out) {
#if PY_VERSION_HEX < 0x030C0000
    if (PyLong_CheckExact(value)) {
        const digit *d = ((PyLongObject *)value)->ob_digit;
        switch (Py_SIZE(value)) {
        case 0: *out = 0; return 0;
        case 1: *out = d[0]; return 0;
        case 2: *out = d[0] | (uint64_t)d[1] << PyLong_SHIFT; return 0;
#if PyLong_SHIFT == 30
        case 3:
            if (d[2] < 16) { *out = d[0] | (uint64_t)d[1] << 30 | (uint64_t)d[2] << 60; return 0; }
#endif
        }
    }
#else
    if (PyLong_CheckExact(value) && PyUnstable_Long_IsCompact((PyLongObject *)value)) {
        Py_ssize_t small = PyUnstable_Long_CompactValue((PyLongObject *)value);
        if (small >= 0) { *out = (uint64_t)small; return 0; }
    }
#endif
    *out = PyLong_AsUnsignedLongLong(value);
    return *out == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* The same, where anything else is no error: 1 or 0. */
static inline int kvd_is_u64(PyObject *value, uint64_t *out) {
    if (kvd_u64(value, out) == 0) return 1;
    PyErr_Clear();
    return 0;
}

/* Token ids as u32 words. Returns how many were packed: fewer than `count` if the next one is not an int below 2^32. */
static inline Py_ssize_t kvd_pack_u32(PyObject *const *tokens, Py_ssize_t count, uint32_t *out, uint32_t *highest) {
    uint32_t high = 0;
    Py_ssize_t i;
    for (i = 0; i < count; i++) {
        PyObject *value = tokens[i];
        uint32_t word;
        __builtin_prefetch(tokens[i + 8 < count ? i + 8 : i]);
#if PY_VERSION_HEX < 0x030C0000
        if (PyLong_CheckExact(value) && (size_t)Py_SIZE(value) <= 1)
            word = Py_SIZE(value) ? ((PyLongObject *)value)->ob_digit[0] : 0;
        else
#endif
        {
            uint64_t wide;
            if (!PyLong_Check(value)) break;
            if (kvd_u64(value, &wide) < 0) { PyErr_Clear(); break; }
            if (wide > UINT32_MAX) break;
            word = (uint32_t)wide;
        }
        out[i] = word;
        high = word > high ? word : high;
    }
    *highest = high;
    return i;
}

#endif
