"""Numbers of the gated delta rule that all its forms share."""

MIN_LOG_DECAY = -88.0  # e^-88 is below the smallest normal float32: one such step forgets everything
NORM_EPS = 1e-6  # under the root of an l2 norm
