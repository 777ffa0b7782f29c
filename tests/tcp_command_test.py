#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command as processes that the environment tells who they are (RANK, WORLD_SIZE, MASTER_PORT), as torchrun does:
the same results as on threads, the same refusals as under MPI, and cores of their own.

Usage: tcp_command_test.py TREEATTN MODEL     MODEL: a directory with a tokenizer
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

TREEATTN, MODEL = sys.argv[1:3]
SHAPE = ["--tokens", "3000", "--heads", "6", "--kv-heads", "2", "--head-dim", "64", "--dtype", "f32", "--quick"]
DECODE = ["bench", "decode", *SHAPE, "--strategy", "merge,two_phase,ring"]
GENERATE = ["generate", "--model", MODEL, "--json", "--ignore-eos", "--chunk", "64", "--branches", "16",
            "--max-tokens", "9", "Once upon a time there was a little " * 20]


def free_ports():
    """Two that follow each other."""
    while True:
        port = random.randrange(15000, 30000)
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            pass


def start(ranks, *, size=None, port=None, environment=None):
    """A process for each list of arguments. environment: more variables; None takes one away."""
    port = port or free_ports()
    size = size or len(ranks)
    processes = []
    for rank, arguments in enumerate(ranks):
        who = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables = {**os.environ, **who, **(environment or {})}
        processes.append(subprocess.Popen([TREEATTN, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE, text=True,
                                          env={name: value for name, value in variables.items() if value is not None}))
    return processes


def ended(processes):
    outputs = [process.communicate(timeout=300) for process in processes]
    return [process.returncode for process in processes], [out for out, _ in outputs], [error for _, error in outputs]


def alone(arguments):
    done = subprocess.run([TREEATTN, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_results():
    threads = alone([*DECODE, "--json", "--ranks", "3"])
    codes, outputs, errors = ended(start([[*DECODE, "--json"]] * 3))
    assert codes == [0, 0, 0], errors
    assert outputs[1:] == ["", ""], "ranks other than the first print"
    lines = [json.loads(line) for line in outputs[0].splitlines()]
    assert [line["strategy"] for line in lines] == ["merge", "two_phase", "ring"], lines
    assert {line["transport"] for line in lines} == {"tcp"}, lines
    assert {line["out_hash"] for line in lines} == {line["out_hash"] for line in threads}, "other bits than threads"

    text = alone(GENERATE)[0]
    codes, outputs, errors = ended(start([GENERATE] * 2))
    assert codes == [0, 0], errors
    over_tcp = json.loads(outputs[0])
    assert over_tcp["transport"] == "tcp" and over_tcp["tokens"] == text["tokens"], (over_tcp, text)


def check_refusals():
    codes, _, errors = ended(start([DECODE, [*DECODE, "--seed", "7"]]))
    assert codes == [2, 2], errors
    assert "--seed" in errors[0] and not errors[1], errors
    codes, _, errors = ended(start([["bench", "decode", "--strategy", "star"]] * 2))
    assert codes == [2, 2] and "".join(errors).count("treeattn: ") >= 1, errors
    codes, _, errors = ended(start([[*DECODE, "--ranks", "3"]] * 2))
    assert codes == [2, 2] and "accepted under a launcher: its processes, 2" in errors[0], errors
    # Nobody comes.
    codes, _, errors = ended(start([[*DECODE, "--deadline", "1"]], size=2))
    assert codes == [3] and "rank 1 of 2 did not come" in errors[0], errors
    codes, _, errors = ended(start([DECODE], environment={"WORLD_SIZE": "two"}))
    assert codes == [2] and "WORLD_SIZE = two; accepted: 1 to 65536" in errors[0], errors
    codes, _, errors = ended(start([DECODE], environment={"WORLD_SIZE": "1000000"}))
    assert codes == [2] and "WORLD_SIZE = 1000000; accepted: 1 to 65536" in errors[0], errors
    # Not each by itself.
    for without in [{"MASTER_PORT": None}, {"MASTER_PORT": None, "MASTER_ADDR": None}]:
        codes, outputs, errors = ended(start([DECODE] * 2, environment=without))
        assert codes == [3, 3] and outputs == ["", ""] and "MASTER_PORT is not set" in errors[0], (outputs, errors)
    # An empty address is none.
    alone_there = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": ""}
    codes, _, errors = ended(start([[*DECODE, "--deadline", "1"]], environment=alone_there))
    assert codes == [3] and "no answer from rank 0 at 127.0.0.1:" in errors[0], errors


def check_taken_port():
    """torchrun's own process listens where it tells its workers to."""
    port = free_ports()
    with socket.create_server(("127.0.0.1", port)):
        codes, _, errors = ended(start([DECODE] * 2, port=port, environment={"TORCHELASTIC_USE_AGENT_STORE": "True"}))
    assert codes == [0, 0], errors
    # Somebody who has it for IPv6 alone would get the calls of those who come by that.
    try:
        other = socket.create_server(("::1", port), family=socket.AF_INET6)
    except OSError:
        return  # there is no IPv6 here
    decode = [*DECODE, "--deadline", "1"]
    with other:
        codes, _, errors = ended(start([decode] * 2, port=port, environment={"MASTER_ADDR": "::1"}))
    assert codes == [3, 3] and f"port {port} is in use" in errors[0], errors


def check_slow_writer():
    """A person may take longer than the deadline to write."""
    deadline = 2
    chat = ["chat", "--model", MODEL, "--max-tokens", "5", "--ignore-eos", "--deadline", str(deadline)]
    processes = start([chat, chat])
    for message in ("Hello.\n", "Again.\n"):
        time.sleep(1.5 * deadline)
        processes[0].stdin.write(message)
        processes[0].stdin.flush()
        assert processes[0].stdout.readline().strip(), ended(processes)
    statuses, _, errors = ended(processes)
    assert statuses == [0, 0], errors


def check_torchrun_inside_mpi():
    """Its workers inherit the variables of srun or mpirun, and are ranks all the same."""
    inherited = {"OMPI_COMM_WORLD_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    codes, outputs, errors = ended(start([[*DECODE, "--json"]] * 2, environment=inherited))
    assert codes == [0, 0] and not outputs[1], (outputs, errors)
    lines = [json.loads(line) for line in outputs[0].splitlines()]
    assert {(line["transport"], line["ranks"]) for line in lines} == {("tcp", 2)}, lines


def cores_of(process):
    with open(f"/proc/{process.pid}/status", encoding="ascii") as status:
        return next(line.split()[1] for line in status if line.startswith("Cpus_allowed_list"))


def check_cores_and_loss():
    """Each of two has half of the cores; when one is killed the other names it."""
    processes = start([[*DECODE, "--repeat", "100000", "--deadline", "5"]] * 2)
    if len(os.sched_getaffinity(0)) > 1:
        until = time.monotonic() + 60
        while cores_of(processes[0]) == cores_of(processes[1]):
            assert time.monotonic() < until, f"both on {cores_of(processes[0])}"
            time.sleep(0.01)
    else:
        time.sleep(2)
    processes[1].send_signal(signal.SIGKILL)
    codes, _, errors = ended(processes)
    assert codes == [4, -signal.SIGKILL] and "rank 1" in errors[0], (codes, errors)


check_results()
check_refusals()
check_taken_port()
check_slow_writer()
check_torchrun_inside_mpi()
check_cores_and_loss()
print("all as it should be")
