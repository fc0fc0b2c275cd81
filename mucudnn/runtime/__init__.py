"""The code that torch calls while a program runs."""
