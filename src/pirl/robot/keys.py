"""The keys that pirl adds to OpenPI's messages. Stock clients and servers ignore them; all are optional.

In a request, beside the observation's own keys:
"""

EPISODE = "pirl/episode"
"""Name of the episode; a new name starts a new episode. Stock clients never send it."""
STEP = "pirl/step"
"""Number of the control step, from 0, at which this observation was made."""
EXECUTED = "pirl/executed"
"""Steps of the last reply's chunk that the robot has executed when it makes this observation."""
DELAY = "pirl/delay"
"""Further steps of that chunk the robot will probably execute before it can use the reply. For real-time chunking: the
reply's first `DELAY` actions should agree with the last chunk's actions from `EXECUTED` on."""

# In a reply, as plain text and numbers: chunk brokers cut arrays into steps, and leave everything else alone.
POLICY = "pirl/policy"
"""Which policy planned the chunk, or the code that stands for it in a blind comparison."""

VALUE = "pirl/value"
"""The critic's value of the chunk, where the critic chose it."""
SPREAD = "pirl/spread"
"""Standard deviation of the values of all candidates."""
CANDIDATES = "pirl/candidates"
"""Chunks that were compared."""
NOVELTY = "pirl/novelty"
"""How far the observation is from the policy's training data; 1 is the distance that one in twenty episodes reaches."""

# In an action, between a takeover and the recorder on the robot; never sent.
INTERVENTION = "pirl/intervention"
"""True where a person chose the action."""

PREFIX = "pirl/"
