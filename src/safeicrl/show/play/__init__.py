"""`safeicrl play`: a local web page on which a visitor watches frozen agents learn a task.

messages.py   what a visitor may say: the schema of every message
session.py    one visitor: what was asked for, and in which order it may be asked
scenes.py     how each world looks on the page
stage.py      the trials of one agent, all visitors' in one compiled program
worlds.py     who can be watched: worlds and their agents
hall.py       all visitors: seats them, advances their trials in time, sends frames
server.py     HTTP and WebSocket
page/         the page itself: HTML, CSS and JavaScript as they are served
"""
