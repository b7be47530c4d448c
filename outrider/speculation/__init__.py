"""The maths of speculation: what is likely to be accepted, what it costs, how much to guess.

Pure Python, because it runs once a round in the orchestrator; numpy only behind the simulator.

acceptance.py    which guesses survive, by position: a session's counts, a prior of all sessions
costs.py         seconds as lines of rows and steps, fitted while serving
fan_out.py       which outcomes of a verification are worth preparing for
length.py        k, fan-out and proposer with the most tokens per second
observation.py   what a round brought
gate.py          whether the sessions of a target guess at all, found by trying both
load.py          what the sessions of one target share
beliefs.py       what a session makes of all that
account.py       what a session may lose to trying, and when it may try
course.py        its moves: enter, leave, one length to another, tries
controller.py    all of it, a decision a round
traces.py        recorded rounds, as a file
processes.py     acceptance as a process, estimated from a trace
world.py         what a simulation takes for true
simulator.py     sessions, draft and target in simulated time
policies.py      fixed lengths, an oracle, ours
replay.py        policies compared on a trace
examples.py      a trace made from measured figures
plot.py          tokens per second and regret, drawn
"""
