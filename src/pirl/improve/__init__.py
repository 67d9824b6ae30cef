"""`pirl improve`: collect with the current policy, train a candidate, compare both blindly, promote the better one."""
