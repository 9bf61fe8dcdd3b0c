"""Records in, one self-contained HTML page out. Nothing here measures, and nothing here knows a model."""
