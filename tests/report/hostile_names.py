"""Names that a page must show and not obey."""

HOSTILE = "<script>alert(1)</script>"
IMAGE = "<img src=x onerror=alert(2)>"
BOLD = "</script><b>bold</b>"
