"""A request becomes a plan: exact where the checkpoint's own rules can be followed, else a text prefix and a reason.

Start with :class:`planner.plan.Planner`. Importing this package loads neither transformers nor Pillow: they belong to
the optional extra ``kvd[planner]`` and are imported when a planner is built.
"""
