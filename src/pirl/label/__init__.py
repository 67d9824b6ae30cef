"""`pirl label`: a local page for labelling recorded episodes."""
