"""What errors of a format may amount to in a model's outputs and gradients."""

import math

SLACK = 1 + 3 * 0.09


Q_E4M3, Q_E5M2 = (2.0 ** -(m + 1) / math.sqrt(3) * math.sqrt(0.75 / (2 * math.log(2))) for m in (3, 2))


FORWARD, BACKWARD = math.hypot(Q_E4M3, Q_E4M3), math.hypot(Q_E4M3, Q_E5M2)
