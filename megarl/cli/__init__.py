"""The command line. All printing to people is here."""
