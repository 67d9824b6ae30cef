"""π₀ and π₀.₅ as plain functions over OpenPI's parameter tree, and code shared by all flow policies."""
