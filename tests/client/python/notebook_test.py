"""A notebook that uses a pool, is interrupted, and goes on."""
import asyncio
import re

import nbclient
import nbformat

CELLS = ["""
import pathlib
import threading
import cppool
pool = cppool.Pool(2, backend="host")
before = pool.hello()["pid"]
pool.run({"max_seqlen_q": 64})
""", """
def tell():
    while (pool.status()["running"] or {}).get("iteration", 0) == 0:
        pass
    pathlib.Path("begun").touch()

threading.Thread(target=tell).start()
pool.run({"max_seqlen_q": 64, "num_heads": 4}, repeat=10000)
""", """
assert pool.hello()["pid"] == before
pool.run({"max_seqlen_q": 64}).status
"""]


def test_an_interrupted_notebook_goes_on(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": tmp_path}})

    async def execute():
        async with client.async_setup_kernel():
            for index, cell in enumerate(notebook.cells):
                cell_ends = asyncio.create_task(client.async_execute_cell(cell, index))
                if index == 1:
                    while not (tmp_path / "begun").exists() and not cell_ends.done():
                        await asyncio.sleep(0.01)
                    await client.km.interrupt_kernel()
                await cell_ends

    asyncio.run(execute())
    first, interrupted, last = (cell.outputs for cell in notebook.cells)
    assert "passed" in first[-1].data["text/html"]
    assert re.search("cppool: rank 0: .*; rank 1: ", "".join(output.text for output in interrupted if output.output_type == "stream"))
    assert [output.ename for output in interrupted if output.output_type == "error"] == ["KeyboardInterrupt"]
    assert last[-1].data["text/plain"] == "'passed'", last
