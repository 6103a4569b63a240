"""The programs: absl command lines over `tff_bn`."""
