"""Numbers that the forms of an operation share."""

MIN_LOG_DECAY = -88.0  # e^-88 is below the smallest normal float32: one such step forgets everything
NORM_EPS = 1e-6  # under the root of an l2 norm, and of the Weaver's RMS norms
PATH = 16  # slots on a path of a Weaver's tree, the root's among them
