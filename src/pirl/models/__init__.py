"""π₀ and π₀.₅ as plain functions over OpenPI's parameter tree, and what any flow policy shares."""
