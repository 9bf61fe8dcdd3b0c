"""A page that is open in a real browser, and how a test waits and reaches for what is on it."""

import time

DRAWN = "!document.getElementById('plotly-source') || document.documentElement.dataset.charts === 'drawn'"
PATIENCE = 120_000  # milliseconds; a page that is slow on a busy machine is no failure


class Visit:
    """A page that is open, and what it asked for and complained of."""

    def __init__(self, browser, path, hash="", **options):
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.complaints, self.requests, self.dialogs = [], [], []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        self.page.goto(path.as_uri() + hash, wait_until="domcontentloaded")
        self.until(DRAWN)

    def until(self, condition):
        """Wait until an expression is true. Asked from here: the page's own policy forbids it to evaluate text."""
        end = time.monotonic() + PATIENCE / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, condition
            self.page.wait_for_timeout(20)

    def reach_for(self, chart):
        """Rest the mouse on a chart until plotly has drawn it."""
        figure = self.page.locator(".plotly-figure").nth(chart)
        figure.scroll_into_view_if_needed()
        figure.hover()
        self.page.mouse.move(0, 0)
        figure.hover()
        self.until(f"document.querySelectorAll('.plotly-figure')[{chart}].matches('[data-live]:not(.reading)')")
        return figure

    def seek(self, step):
        """Go to a step by the address, as a link does."""
        self.page.evaluate(f"location.hash = 'elsewhere'; location.hash = 'step={step}'")
        self.until(f"document.querySelector('.film').dataset.step === '{step}'")

    @property
    def step(self):
        return int(self.page.locator(".film").get_attribute("data-step"))

    def bars(self):
        return self.page.locator(".layer .bars").evaluate_all("all => all.map((bars) => bars.getAttribute('d'))")
