"""What can go wrong for a user. Every message names the file or field, the cause and the way out."""


class HeadstartError(Exception):
    """The base of all errors that Headstart raises on purpose."""


class CheckpointError(HeadstartError):
    """A model folder, or a name that leads to none, that cannot be used."""


class HeadError(CheckpointError):
    """A multi-token-prediction head that is there but cannot be used; the trunk can."""


class HubError(HeadstartError):
    """The Hugging Face hub cannot be reached, or has no such model."""


class RequestError(HeadstartError):
    """A request that cannot be honoured as it stands."""


class ClusterError(HeadstartError):
    """Several machines that cannot work together."""


class Down(HeadstartError):
    """The engine is no more, and all requests with it."""


class OutOfMemory(HeadstartError):
    """The device's memory ran out, and this request was ended so that others could go on."""


class Busy(HeadstartError):
    """Not now: try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after
