"""What a program prints: a module has a `DIALECT`, or several in `DIALECTS`. It is used as soon as it is here."""
