"""The page at `/`: plain files, nothing to build."""
