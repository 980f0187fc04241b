"""Constants of number formats: scales and centers, measured or read from a checkpoint."""

from kvfactory.calibration.constants import (
    Constants,
    Key,
    calibrate,
    is_ours,
    required_constants,
)

__all__ = ["Constants", "Key", "calibrate", "is_ours", "required_constants"]
