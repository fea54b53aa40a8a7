"""A neural network with an external memory: the differentiable neural computer and its controllers."""

from fairseq_sg.modules.memory import feedforward, lstm  # registers the controllers
from fairseq_sg.modules.memory.controller import CONTROLLER_REGISTRY, Controller
from fairseq_sg.modules.memory.dnc import DNC, Record, State
from fairseq_sg.modules.memory.interface import Interface
