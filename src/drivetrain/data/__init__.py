"""From a loader to batches on the device."""
