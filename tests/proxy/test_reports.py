"""The gateway listens to instances over real sockets."""

from epd_serve.protocol.instance_state import Load, Report


async def test_a_silent_instance_gets_no_request_until_it_reports(start, kit):
    """As one that is stopped or hangs: its connections are open and nothing comes."""
    gateway = await start("p0:P", "p1:P", "d0:D", reporting=True)
    gateway["p1"].hangs = True
    await gateway.until(lambda: not gateway.table["p1"].ready and gateway.table["p0"].ready)
    for _ in range(4):
        assert (await gateway.answer(kit.chat()))[0] == 200
    assert not gateway["p1"].got("/stage/prefill")
    gateway["p1"].hangs = False
    await gateway.until(lambda: gateway.table["p1"].ready)


async def test_prompts_with_one_beginning_go_to_one_place(start, kit):
    gateway = await start("p0:P", "p1:P", "p2:P", "d0:D", routing="prefix_affinity")
    text = "You are a helpful assistant. " * 40
    picture = kit.data_url(kit.picture())
    for number in range(6):
        body = kit.chat(picture) | {"max_tokens": 3}
        body["messages"].insert(0, {"role": "system", "content": text})
        body["messages"].append({"role": "user", "content": f"question {number}"})
        assert (await gateway.answer(body))[0] == 200
        await gateway.settle()
    counts = sorted(len(gateway[name].got("/stage/prefill")) for name in ("p0", "p1", "p2"))
    assert counts == [0, 0, 6]


async def test_reports_of_a_lost_instance_are_dropped(start):
    """Nobody sees sequences run where nothing runs any more."""
    gateway = await start("p0:P", "d0:D", reporting=True)
    gateway["d0"].report = lambda: Report(load=Load(num_running=3))

    async def running():
        lines = (await gateway.text("/metrics")).splitlines()
        names = "vllm:num_requests_running", "epd_serve_instance_req"
        return [line for line in lines if line.startswith(names) and line.endswith(" 3.0")]

    await gateway.until(lambda: gateway.table["d0"].load.num_running == 3)
    assert await running()
    gateway.table.mark_lost("d0")
    assert not await running()
