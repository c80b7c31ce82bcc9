"""A server with the HTTP surface of an older vLLM release, to be broken in many ways."""

import asyncio

from aiohttp import web


class OldVllm:
    """Answers like vLLM 0.25: empty bodies, /sleep answers before it sleeps, no filtered metrics page."""

    def __init__(self) -> None:
        self.asleep = self.paused = False
        self.running = 0
        self.dev_mode = True
        self.finish_reason = "length"
        self.hang: set[str] = set()
        # Answers 500 to /is_sleeping once it was told to sleep.
        self.sleeps_and_breaks = False
        self.calls: list[str] = []
        self.sleep_after_s = 0.05
        # Set by what it is told; 0 for releases that say nothing of it.
        self.level = 0
        self.reloaded = False
        self.reload_status = 200
        # What newer releases answer to /reset_prefix_cache; this one says nothing.
        self.reset_answer = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append(f"{request.method} {request.path_qs}")
        if path in self.hang:
            await asyncio.sleep(30)
        if path == "/health":
            return web.Response()
        if path == "/metrics":
            awake = 0 if self.asleep else 1
            state = f'vllm:engine_sleep_state{{sleep_state="awake"}} {awake}\n'
            state += f'vllm:engine_sleep_state{{sleep_state="discard_all"}} {int(self.asleep and self.level == 2)}\n'
            return web.Response(text=f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting 0\n" + state)
        if path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "served", "object": "model"}]})
        if path == "/v1/completions":
            body = await request.json()
            choices = [{"text": "x", "finish_reason": self.finish_reason}]
            return web.json_response({"model": body["model"], "choices": choices, "usage": {"completion_tokens": 1}})
        if path == "/is_sleeping" and self.sleeps_and_breaks and "POST /sleep" in " ".join(self.calls):
            return web.Response(status=500)
        if self.dev_mode and path == "/is_sleeping":
            return web.json_response({"is_sleeping": self.asleep or self.paused})
        if self.dev_mode and path == "/sleep":
            asyncio.get_running_loop().call_later(self.sleep_after_s, setattr, self, "asleep", True)
            return web.Response()
        if self.dev_mode and path == "/wake_up":
            self.asleep = self.asleep and request.query.get("tags") == "weights"
            self.paused = False
            return web.Response()
        if self.dev_mode and path == "/collective_rpc":
            self.reloaded = (await request.json()) == {"method": "reload_weights"} and self.reload_status == 200
            return web.Response(status=self.reload_status)
        if self.dev_mode and path == "/reset_prefix_cache":
            return web.Response(text=self.reset_answer)
        return web.Response(status=404, text='{"detail":"Not Found"}')
