"""The error of a rejected request: a sentence, and the control of the page that caused it."""


class Refused(ValueError):
    """A rejected request.

    Args:
        message: sentence for the visitor.
        control: name of the field that caused it; empty if none did.
        status: HTTP status.
    """

    def __init__(self, message: str, control: str = "", status: int = 400):
        super().__init__(message)
        self.control, self.status = control, status

    def record(self) -> dict[str, str]:
        """Return what the page shows."""
        return {"message": str(self), "control": self.control}
