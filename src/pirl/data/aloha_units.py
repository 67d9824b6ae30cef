"""ALOHA's joints and grippers in π₀'s pretraining space, and back.

There some joints have the opposite sign, and grippers are angles between encoder counts 2405 and 3110 of 4096 (zero at
2048). ALOHA's runtime reports grippers as a fraction between two finger positions in metres, and commands them as a
fraction between two joint angles.
"""

import numpy as np
from jaxtyping import Float

from pirl.records import Array

_FLIPS = np.array([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0] * 2)
_GRIPPERS = [6, 13]
_FINGER_CLOSED, _FINGER_OPEN = 0.01844, 0.05800
_ARM_LENGTH, _HORN_RADIUS = 0.036, 0.022
_PI_CLOSED, _PI_OPEN = 0.5476, 1.6296
_JOINT_CLOSED, _JOINT_OPEN = -0.6213, 1.4910


def aloha_state_to_pi(state: Float[Array, "*B 14"]) -> Float[Array, "*B 14"]:
    """ALOHA's state in π₀'s pretraining space."""
    out = _FLIPS * state
    finger = out[..., _GRIPPERS] * (_FINGER_OPEN - _FINGER_CLOSED) + _FINGER_CLOSED
    sine = (_HORN_RADIUS**2 + finger**2 - _ARM_LENGTH**2) / (2 * _HORN_RADIUS * finger)
    out[..., _GRIPPERS] = (np.arcsin(np.clip(sine, -1.0, 1.0)) - _PI_CLOSED) / (_PI_OPEN - _PI_CLOSED)
    return out


def aloha_actions_to_pi(actions: Float[Array, "*B 14"]) -> Float[Array, "*B 14"]:
    """ALOHA's actions in π₀'s pretraining space. Gripper commands become radians minus π₀'s offset, without scaling."""
    out = _FLIPS * actions
    out[..., _GRIPPERS] = out[..., _GRIPPERS] * (_JOINT_OPEN - _JOINT_CLOSED) + _JOINT_CLOSED - _PI_CLOSED
    return out


def aloha_actions_from_pi(actions: Float[Array, "*B 14"]) -> Float[Array, "*B 14"]:
    """Inverse of `aloha_actions_to_pi`."""
    out = _FLIPS * actions
    out[..., _GRIPPERS] = (out[..., _GRIPPERS] + _PI_CLOSED - _JOINT_CLOSED) / (_JOINT_OPEN - _JOINT_CLOSED)
    return out
