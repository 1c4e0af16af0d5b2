"""The demo from beginning to end: a server, a phase for each policy, the view while they run, the summary and the picture. Every
way out, Ctrl-C included, ends the streams and the server."""

from __future__ import annotations

import asyncio
import itertools
import signal
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from fairlane.clock import Clock
from fairlane.demo import figures
from fairlane.demo.board import Board, PhaseResult, new_board, result_of
from fairlane.demo.narrate import sentence
from fairlane.demo.picture import draw
from fairlane.demo.scenario import LOADS, MAX_NUM_SEQS, PHASE_S, PhasePolicy, pace_of, paced, policy_text
from fairlane.demo.server import DemoServer, Place, is_in_force
from fairlane.demo.traffic import Traffic
from fairlane.demo.view import Scene, ending, plain_line, screen

_FRAMES_PER_S = 4
_PLAIN_EVERY_S = 5.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """place: somebody's running server, shown as it is for one phase; None: a server of our own. seconds: of a phase; None: what
    the machine's speed asks for."""

    policies: tuple[PhasePolicy, ...]
    seconds: float | None
    picture: Path | None
    place: Place | None = None


class Show:
    """Runs once."""

    def __init__(self, options: Options, console: Console, clock: Clock) -> None:
        self._options = options
        self._console = console
        self._clock = clock
        self._done: list[PhaseResult] = []
        self._numbers = itertools.count()
        self._loads = LOADS
        self._seconds = options.seconds or PHASE_S

    async def run(self) -> bool:
        """Whether it ran to its end; False if it was interrupted. Raises ServerFailed."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stopped.set)
        phases = asyncio.create_task(self._phases())
        stopping = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait((phases, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not phases.done():
                phases.cancel()
                await asyncio.wait((phases,))
        if not phases.cancelled():
            phases.result()
        self._finish()
        return not phases.cancelled()

    async def _phases(self) -> None:
        options = self._options
        if options.place is not None:
            await self._calibrate(options.place)
            scene = Scene(1, 1, "your server, as it is", self._seconds, "")
            await self._phase(scene, "yours", options.place)
            return
        server = DemoServer(self._clock)
        try:
            for number, policy in enumerate(options.policies, 1):
                with self._console.status(f"{policy.title}: putting the policy in force", spinner="dots"):
                    await server.put_in_force(policy_text(policy))
                if number == 1:
                    await self._calibrate(server.place)
                scene = Scene(number, len(options.policies), policy.title, self._seconds, str(server.policy_path))
                await self._phase(scene, policy.value, server.place)
        finally:
            with self._console.status("stopping the server", spinner="dots"):
                await server.close()

    async def _calibrate(self, place: Place) -> None:
        """Work for this machine: on a fast one the tenants must ask more often, or there is nothing to share out."""
        traffic = Traffic(place.target, place.keys, self._clock, self._numbers)
        with self._console.status("measuring this machine", spinner="dots"):
            speed = await traffic.speed(LOADS[-1], MAX_NUM_SEQS)
        pace = pace_of(speed)
        self._loads = paced(LOADS, pace)
        self._seconds = self._options.seconds or PHASE_S * max(1.0, pace)
        what = ", ".join(f"{load.tier}: {load.says}" for load in self._loads)
        self._say(f"this machine does {speed:.0f} tokens/s; {what}; {self._seconds:.0f} s a phase")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    async def _phase(self, scene: Scene, policy: str, place: Place) -> None:
        board = new_board(self._loads)
        before = await figures.fetch(place.metrics)
        figures.show(before, board)
        start_s = self._clock.now()
        traffic = Traffic(place.target, place.keys, self._clock, self._numbers)
        watching = [
            asyncio.create_task(self._poll(place, board, scene.policy_path, before)),
            asyncio.create_task(self._draw(scene, board, start_s)),
        ]
        try:
            await traffic.run(board, start_s, scene.seconds)
        finally:
            seconds = min(scene.seconds, self._clock.now() - start_s)
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            if seconds >= 1:
                edited = before is not None and board.generation != before.generation
                title = f"{scene.title} (edited)" if edited else scene.title
                self._done.append(result_of(board, policy, title, seconds))

    @staticmethod
    async def _poll(place: Place, board: Board, policy_path: str, before: figures.Figures | None) -> None:
        while True:
            now = await figures.fetch(place.metrics)
            figures.show(now, board)
            if policy_path and now is not None and before is not None:
                board.file_is_bad = now.failures > before.failures and not is_in_force(Path(policy_path), now.sha256)
            await asyncio.sleep(_POLL_S)

    async def _draw(self, scene: Scene, board: Board, start_s: float) -> None:
        if not self._console.is_terminal:
            await self._print(scene, board, start_s)
            return
        with Live(console=self._console, auto_refresh=False, screen=True) as live:
            while True:
                now_s = self._clock.now() - start_s
                live.update(screen(scene, board, now_s, self._done, self._console.width), refresh=True)
                await asyncio.sleep(1 / _FRAMES_PER_S)

    async def _print(self, scene: Scene, board: Board, start_s: float) -> None:
        self._say(f"phase {scene.number} of {scene.total}: {scene.title}")
        if scene.policy_path:
            self._say(f"edit {scene.policy_path} while it runs")
        while True:
            await asyncio.sleep(_PLAIN_EVERY_S)
            now_s = self._clock.now() - start_s
            self._say(plain_line(scene, board, now_s))
            self._say(f"  {sentence(board, now_s)}")

    def _finish(self) -> None:
        if not self._done:
            return
        console = self._console
        if not console.is_terminal:
            console = Console(file=console.file, width=160)
        console.print(ending(self._done))
        if self._options.picture is not None:
            draw(self._done, self._options.picture)
            self._say(f"picture: {self._options.picture}")
