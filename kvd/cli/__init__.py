"""The command line: nouns and verbs over the client library."""
