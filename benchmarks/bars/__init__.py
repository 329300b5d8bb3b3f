"""The bars, one module per kind of work.  A new one needs only its `@bar` function here."""
