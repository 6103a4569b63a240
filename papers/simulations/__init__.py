"""The analyses of `tff-bn-analyze`, each with its flags, tables and plots."""
