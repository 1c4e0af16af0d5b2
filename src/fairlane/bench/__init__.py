"""Running loads on an engine in this process, and what they come to."""

import fairlane.worker  # noqa: F401 - sets what torch must find in the environment before anybody imports it
