"""The machine of the command line: parsing, help, errors, groups of flags."""
