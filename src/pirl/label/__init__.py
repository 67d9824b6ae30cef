"""`pirl label`: a page on this machine where people say how recorded episodes ended."""
