"""A headless Chromium, driven over a pair of pipes: no port is opened, no package is needed, no network is there."""

import base64
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.waiting import LIMIT_S

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The browser reads commands from descriptor 3 and writes to 4, each message ended by a NUL.
_START = 'exec "$0" "$@" 3<&{read} 4>&{write}'


class Chromium:
    """One browser with one tab. `events` holds what it told since the page was opened; `requests` every address it
    asked for; `console` every error and warning; `dialogs` every alert."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", _START.format(read=commands, write=answers), PROGRAM, "--headless", "--no-sandbox",
             "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}",
             "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--no-first-run",
             "--hide-scrollbars", "about:blank"],
            pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=(profile / "stderr").open("wb"), env={**os.environ, "HOME": str(profile)},
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._number, self._buffer, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        tabs = self.call("Target.getTargets")["targetInfos"]
        tab = next(target["targetId"] for target in tabs if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # else no focus event without a window in front

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; RuntimeError with the browser's words where it refuses."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']}")
                result: dict[str, Any] = said["result"]
                return result
            self.events.append(said)

    def open(self, file: Path, width: int = 1280, height: int = 900, dark: bool = False, script: bool = True,
             scale: float = 1) -> None:  # fmt: skip
        """Opens a file in a window of that size, and forgets what was told before."""
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=width < 500)  # fmt: skip
        self.media(dark)
        self._go("about:blank")
        self.events = []
        self._go(file.as_uri())

    def media(self, dark: bool = False, medium: str = "") -> None:
        """The theme and the medium (`print`) that the page is shown for."""
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=medium, features=[theme])

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        """Waits for a JavaScript expression to be true, as after an event; TimeoutError in the end."""
        look = f"const look = () => ({expression}) ? done(true) : setTimeout(look, 10); look();"
        self.run(f"new Promise((done) => {{ {look} }})")

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key of the keyboard, down and up, where the focus is."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code, "nativeVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """A real click in the middle of the first element that the selector finds."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        # The browser finds what is clicked by the last frame that it has drawn.
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        at = self.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({found}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1)

    def screenshot(self, file: Path, whole: bool = True) -> None:
        """A picture of the page as a png, down to its end where `whole`."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        """The page as it is printed, on the paper that its style asks for."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def roles(self) -> list[tuple[str, str, str]]:
        """(role, name, description) of everything a screen reader meets."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            tuple(str(node.get(key, {}).get("value", "")) for key in ("role", "name", "description"))  # type: ignore[misc]
            for node in nodes
            if not node.get("ignored")
        ]

    @property
    def requests(self) -> list[str]:
        """Every address that was asked for."""
        return [event["params"]["request"]["url"] for event in self._of("Network.requestWillBeSent")]

    @property
    def console(self) -> list[str]:
        """What the page or the browser wrote to the console, and every exception."""
        self.run("0")  # what was told before is read by now
        told = [event["params"]["entry"]["text"] for event in self._of("Log.entryAdded")]
        told += [str(event["params"]["args"]) for event in self._of("Runtime.consoleAPICalled")]
        return told + [str(event["params"]["exceptionDetails"]) for event in self._of("Runtime.exceptionThrown")]

    @property
    def dialogs(self) -> list[str]:
        """Every alert and question that the page opened."""
        return [event["params"]["message"] for event in self._of("Page.javascriptDialogOpening")]

    def close(self) -> None:
        """Ends the browser, and all that it started."""
        try:
            self._session = ""
            self.call("Browser.close")
        except (OSError, RuntimeError, TimeoutError):
            self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _go(self, address: str) -> None:
        loader = self.call("Page.navigate", url=address)["loaderId"]
        while not any(
            event["params"]["name"] == "load" and event["params"]["loaderId"] == loader
            for event in self._of("Page.lifecycleEvent")
        ):
            self.events.append(self._next())

    def _of(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("method") == method]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], LIMIT_S)[0]:
                raise TimeoutError("chromium says nothing")
            read = os.read(self._answers, 1 << 20)
            if not read:
                raise RuntimeError("chromium is gone")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        said: dict[str, Any] = json.loads(message)
        return said
