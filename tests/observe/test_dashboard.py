"""The live page in a browser: live figures, no overflow, nothing on the console, readable in light and dark."""

import asyncio
import re
from pathlib import Path

import browser
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHOWN = "ready|TTFT|e0|p1|d2|8 tokens|Feature hits|Recent requests|SLO attainment|p99|No bottleneck"
FAINT = (Path(__file__).parent / "contrast.js").read_text()


async def test_the_page_asks_for_the_key_and_shows_live_data(observed, ask, tmp_path):
    program = browser.find_browser()
    if program is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium-headless-shell")
    await asyncio.gather(ask(stream=True, max_tokens=8), ask("red", "blue", max_tokens=4))
    async with browser.browser(program, tmp_path / "profile") as page:
        await page.look(1280, 900, "light")
        await page.open(f"{observed.url}/dashboard")
        await page.until("document.getElementById('login')?.hidden === false")
        assert any("401" in problem for problem in page.problems)
        page.problems.clear()
        await page.run(
            "document.getElementById('key').value = 'sk-observed'; document.querySelector('form button').click()"
        )
        await page.until("Number(document.body.dataset.ticks) >= 1")
        before = await page.run("document.querySelectorAll('.request .track').length")
        await ask("gold", stream=True, max_tokens=8)
        await page.until(f"document.querySelectorAll('.request .track').length > {before}")
        text = await page.run("document.body.innerText")
        assert [one for one in SHOWN.split("|") if one not in text] == []
        assert "restarts" in text.lower()
        for width, scheme in ((1280, "light"), (1280, "dark"), (400, "dark"), (400, "light")):
            await page.look(width, 900, scheme)
            ticks = await page.run("Number(document.body.dataset.ticks)")
            await page.until(f"Number(document.body.dataset.ticks) > {ticks}")
            assert await page.run("document.documentElement.scrollWidth") <= width
            assert await page.run(FAINT) == []
            shot = await page.screenshot()
            assert shot.startswith(b"\x89PNG") and len(shot) > 20_000
            (tmp_path / f"{width}-{scheme}.png").write_bytes(shot)
        assert page.problems == []


async def test_the_data_ask_for_a_key_and_the_page_allows_nothing_foreign(observed):
    async with observed.session.get(f"{observed.url}/dashboard", headers={"authorization": ""}) as response:
        assert response.status == 200
        policy, text = response.headers["content-security-policy"], await response.text()
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    async with observed.session.get(f"{observed.url}/dashboard/data", headers={"authorization": ""}) as response:
        assert response.status == 401
    async with observed.session.get(f"{observed.url}/dashboard/data") as response:
        data = await response.json()
    assert {one["name"] for one in data["instances"]} == {"e0", "p1", "d2"}
    assert "alice" not in str(data)


async def test_failed_requests_are_shown_with_their_reason(observed, ask):
    await ask(max_tokens=2)
    asked = {"model": "gone", "messages": [{"role": "user", "content": "x"}]}
    status, _ = await observed.post("/v1/chat/completions", asked)
    assert status == 404
    async with observed.session.get(f"{observed.url}/dashboard/data") as response:
        data = await response.json()
    assert data["window"]["reasons"]["404 model_not_found"] >= 1
    assert len(data["series"]["requests"]) == 60 and data["window"]["num_failed"] == 0
    assert all(one["memory_bytes"] > 1 << 20 and one["restarts"] == 0 for one in data["instances"])
