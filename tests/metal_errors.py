"""What MLX says of Metal's errors, as others have reported it: of commands that fail on the device, and of memory."""

COMMAND = "[METAL] Command buffer execution failed: {} ({}:kIOGPUCommandBufferCallbackError{})."
TIMEOUT = COMMAND.format("Caused GPU Timeout Error", "00000002", "Timeout")
INTERACTIVITY = COMMAND.format("Impacting Interactivity", "0000000e", "ImpactingInteractivity")
IGNORED = COMMAND.format("Ignored (for causing prior/excessive GPU errors)", "00000004", "SubmissionsIgnored")
HANG = COMMAND.format("Caused GPU Hang Error", "00000003", "Hang")
INSUFFICIENT = COMMAND.format("Insufficient Memory", "00000008", "OutOfMemory")
RESOURCES = "[metal::malloc] Resource limit (499000) exceeded."
