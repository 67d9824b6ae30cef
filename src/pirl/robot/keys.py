"""The keys that pirl adds to OpenPI's messages. Stock clients and servers ignore them; all are optional.

In a request, besides the observation's own keys:
"""

EPISODE = "pirl/episode"
"""Name of the episode; a new name starts a new episode. Stock clients never send it."""
STEP = "pirl/step"
"""Index of the control step of this observation, from 0."""
EXECUTED = "pirl/executed"
"""Steps of the last reply's chunk that the robot had executed at this observation."""
DELAY = "pirl/delay"
"""Further steps of that chunk the robot will probably execute before it can use the reply. For real-time chunking: the
reply's first `DELAY` actions should agree with the last chunk's actions from `EXECUTED` on."""

# In a reply, as plain text and numbers: chunk brokers split arrays into steps and pass on everything else.
POLICY = "pirl/policy"
"""Name of the policy that planned the chunk, or its code in a blind comparison."""

VALUE = "pirl/value"
"""The critic's value of the chunk, if the critic chose it."""
SPREAD = "pirl/spread"
"""Standard deviation of all candidates' values."""
CANDIDATES = "pirl/candidates"
"""Number of candidate chunks."""
NOVELTY = "pirl/novelty"
"""Distance of the observation from the policy's training data; one in twenty episodes reaches 1."""

# In an action, between a takeover and the recorder on the robot; never sent.
INTERVENTION = "pirl/intervention"
"""True if a person chose the action."""

PREFIX = "pirl/"
