"""``sg_operator``: maps a function on a grid to a function on a grid, by attention between points (Cao 2021).

    a           the input on the grid, scaled if ``--field-scaling scalar``
    h⁰          W [a; x] + b at every point x; in two dimensions, perhaps after convolutions down to a coarse grid
    h           layers of attention without mask, whatever ``--encoder-attention`` says; none: a Fourier neural operator
    u           the spectral decoder (``modules.operator.decoder``), on the fine grid

The coordinates x are features of the input (``--coordinates input``), columns of every head (``heads``, as published),
or nowhere (``none``). No weight depends on the number of points, so a model takes any grid. Kinds of attention that
bring positions depend on it through their distances.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import OPERATOR_ARCHITECTURES
from fairseq_sg.models.checks import MECHANISMS, check_and_fill, check_without_padding
from fairseq_sg.models.config import Configuration, options_by_mechanism
from fairseq_sg.models.layers import build_layers
from fairseq_sg.models.options import EncoderConfig, StackConfig
from fairseq_sg.modules.attention import Context
from fairseq_sg.modules.cpu.dropout import Dropout
from fairseq_sg.modules.norm import final_norm_of
from fairseq_sg.modules.operator import Downsampling, FieldScaling, SpectralDecoder, Upsampling
from fairseq_sg.ops.precision import autocast_disabled
from fairseq_sg.registry import option_names

#: Options of encoder and stack that have an effect without layers.
WITHOUT_LAYERS = ("encoder_embed_dim", "encoder_layers", "position", "dropout", "embedding_dropout")


@dataclass
class SGOperatorConfig(EncoderConfig, StackConfig):
    """Sizes and mechanisms of ``sg_operator``; the options of the mechanisms themselves are joined to these."""

    encoder_layers: int = field(
        default=4, metadata={"help": "layers of attention; 0 leaves a Fourier neural operator", "least": 0}
    )
    encoder_attention: str = field(
        default="galerkin",
        metadata={"help": "attention between points, by name or names (docs/attention.md has the list)"},
    )
    dropout: float = field(
        default=0.0,
        metadata={
            "help": "dropout after each sublayer and convolution, and the default of the other dropouts",
            "least": 0,
            "most": 1,
        },
    )
    coordinates: str = field(
        default="input",
        metadata={
            "help": "coordinates of the points: features of the 'input', columns of all 'heads' of softmax, linear, "
            "galerkin and fourier attention (as published), or 'none'",
            "choices": ("input", "heads", "none"),
        },
    )
    decoder_coordinates: bool = field(
        default=False,
        metadata={"help": "a linear map of the encoder's output and the coordinates before the spectral layers"},
    )
    spectral_layers: int = field(
        default=2, metadata={"help": "spectral layers of the decoder; 0: it works at each point by itself", "least": 0}
    )
    spectral_dim: int = field(default=48, metadata={"help": "width of the spectral layers", "least": 1})
    modes: int = field(default=16, metadata={"help": "frequencies that a spectral layer keeps, with 0", "least": 1})
    readout_dim: int = field(
        default=48, metadata={"help": "width between the last two linear maps of the decoder", "least": 1}
    )
    field_scaling: str = field(
        default="none",
        metadata={
            "help": "'scalar': inputs and targets are scaled to mean 0 and standard deviation 1 of training; or 'none'",
            "choices": ("none", "scalar"),
        },
    )
    coarse_points: int = field(
        default=0,
        metadata={
            "help": "in two dimensions: attention works on a grid with so many points a side, between convolutions "
            "that interpolate; 0: on the grid of the data",
            "least": 0,
        },
    )
    coarse_output: bool = field(
        default=False, metadata={"help": "the output is on the grid of --coarse-points, as for an inverse problem"}
    )
    zero_boundary: bool = field(
        default=False, metadata={"help": "predictions are 0 at the points of the grid's edge, where the target is"}
    )


configuration = Configuration(SGOperatorConfig, MECHANISMS, OPERATOR_ARCHITECTURES)


def resolve(cfg):
    """A checked configuration with every default filled in. Raises UsageError for one that makes no sense."""
    config = configuration.read(cfg)
    if config.position not in (None, "none"):
        raise UsageError(
            f"--position {config.position} is not for a grid, whose points have coordinates: leave it out, and choose "
            "--coordinates"
        )
    check_without_layers(config, cfg)
    config = check_and_fill(config, "embedding_dropout")
    check_without_padding(config)
    if config.coarse_output and not config.coarse_points:
        raise UsageError("--coarse-output needs the grid of --coarse-points: give it, or leave --coarse-output out")
    return config


def check_without_layers(config, cfg) -> None:
    """Raises UsageError for options that have no effect with ``--encoder-layers 0`` or ``--spectral-layers 0``.

    Those of the architecture are let through: ``sg_operator_darcy --encoder-layers 0`` is a model.
    """
    unused = {}
    if config.encoder_layers == 0:
        of_mechanisms = {name for _, options in options_by_mechanism(MECHANISMS) for name in option_names(options)}
        of_layers = [name for cls in (EncoderConfig, StackConfig) for name in option_names(cls)]
        of_layers = [name for name in of_layers if name not in WITHOUT_LAYERS]
        unused = dict.fromkeys([*of_layers, *sorted(of_mechanisms)], "--encoder-layers 0")
    if config.spectral_layers == 0:
        unused["modes"] = "--spectral-layers 0"
        if not config.decoder_coordinates:
            unused["spectral_dim"] = "--spectral-layers 0 and no --decoder-coordinates"
    for name, layers in unused.items():
        if configuration.is_of_user(cfg, name):
            raise UsageError(f"{ranges.flag(name)} has no effect with {layers}: leave it out")
    if config.encoder_layers == 0 and config.coordinates == "heads":
        raise UsageError("--coordinates heads needs attention, and --encoder-layers is 0: choose input or none")


@configuration.register("sg_operator", resolve)
class SGOperator(BaseFairseqModel):
    """See the module's docstring.

    Args:
        config: a resolved configuration.
        dims: 1 or 2.
        statistics: "input" and "target" -> their "mean" and "std" in the training data.
    """

    #: The ``inputs`` of tasks that it reads.
    reads = ("fields",)
    #: The roles whose Values ``forward`` can return.
    attention_roles = ("encoder",)

    def __init__(self, config, dims: int, statistics: dict[str, dict[str, float]]):
        super().__init__()
        self.dims, self.config, width = dims, config, config.encoder_embed_dim
        if config.coarse_points and dims == 1:
            raise UsageError("--coarse-points is for fields of two dimensions: leave it out")
        scales = statistics if config.field_scaling == "scalar" else {}
        for name, of_field in scales.items():
            if of_field["std"] == 0:
                raise UsageError(f"--field-scaling scalar: all values of the {name} are equal in train: leave it out")
        self.input_scaling = FieldScaling(**scales.get("input", {}))
        self.target_scaling = FieldScaling(**scales.get("target", {}))
        self.joins_input = config.coordinates == "input"
        self.down = Downsampling(width, config.coarse_points, config.dropout) if config.coarse_points else None
        features = width if config.coarse_points else 1
        self.lift = nn.Linear(features + dims * self.joins_input, width)
        if config.coarse_points and not self.joins_input:
            self.lift = nn.Identity()  # the convolutions give the features
        self.dropout = Dropout(config.embedding_dropout)
        self.stack, self.final_norm = None, nn.Identity()
        if not config.encoder_layers:
            self.attention_roles = ()
        else:
            config.head_columns = dims if config.coordinates == "heads" else 0
            self.stack = build_layers(config, "encoder")
            self.final_norm = final_norm_of(config, width)
        self.up = Upsampling(width, config.dropout) if config.coarse_points else None
        self.decoder = SpectralDecoder(
            width, config.spectral_dim, config.spectral_layers, config.modes, config.readout_dim, dims,
            config.decoder_coordinates,
        )  # fmt: skip

    @classmethod
    def build_model(cls, cfg, task) -> "SGOperator":
        """A model for the task's fields. Raises UsageError for a configuration that makes no sense."""
        config = resolve(cfg)
        if not hasattr(task, "fields"):
            raise UsageError("this --arch maps functions to functions: choose --task sg_operator")
        if config.zero_boundary and task.fields.periodic:
            raise UsageError(
                "--zero-boundary is for functions on a region with an edge, and these have a period: omit it"
            )
        return cls(config, task.fields.dims, task.fields.statistics)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Fits this model to a checkpoint from before models with ``coarse_output`` had a convolution."""
        if self.config.coarse_output and "up.layer.weight" not in state_dict:
            self.up = None

    def forward(
        self,
        a: Tensor,
        axis: Tensor,
        target_axis: Tensor,
        return_all_hiddens: bool = False,
        value_roles: Collection[str] = (),
    ):
        """The prediction (B, m) or (B, m, m), and a dict.

        The dict has ``aux_losses``, ``values`` (with ``value_roles`` ``("encoder",)``) and, with
        ``return_all_hiddens``, the state after every step under ``inner_states``, each (N, B, C).

        Args:
            a: (B, n) or (B, n, n).
            axis: (n,), the coordinates along a side of the input's grid.
            target_axis: (m,), that of the prediction's grid; m is n, or ``coarse_points`` with ``coarse_output``.

        Raises:
            UsageError: m is another number.
        """
        h, points = self._lifted(self.input_scaling(a), axis)  # (B, n[, n], C), (n[, n], dims)
        h, extra = self._encoded(h, points, return_all_hiddens, value_roles)
        if self.up is not None:
            points_out = self.config.coarse_points if self.config.coarse_output else target_axis.size(0)
            h = self.up(h.movedim(-1, 1), points_out).movedim(1, -1)
        if h.size(1) != target_axis.size(0):
            raise UsageError(
                f"the model predicts on {h.size(1)} points a side, and the data have targets on {target_axis.size(0)}: "
                "for an inverse problem, give --coarse-output and as many --coarse-points"
            )
        target_points = coordinates(target_axis, self.dims)
        u = self.target_scaling.restore(self.decoder(h, target_points))  # (B, m[, m])
        return (without_edge(u) if self.config.zero_boundary else u), extra

    def _lifted(self, a: Tensor, axis: Tensor) -> tuple[Tensor, Tensor]:
        """h⁰ (B, n[, n], C), on the coarse grid if there is one, and the coordinates of its points."""
        z = a.unsqueeze(-1)  # (B, n[, n], 1)
        if self.down is not None:
            z = self.down(a.unsqueeze(1)).movedim(1, -1).to(a)  # (B, m, m, C)
            coarse = torch.linspace(0, 1, z.size(1), dtype=axis.dtype, device=axis.device)
            axis = torch.lerp(axis[:1], axis[-1:], coarse)
        points = coordinates(axis, self.dims)
        if self.joins_input:
            z = torch.cat([z, points.to(z).expand(a.size(0), *points.shape)], dim=-1)
        # Not in the half precision of autocast: neighbours on a fine grid would have one coordinate.
        with autocast_disabled(z.device):
            return self.dropout(self.lift(z)), points

    def _encoded(self, h: Tensor, points: Tensor, keep_hidden: bool, value_roles: Collection[str]):
        if self.stack is None:
            return h, {"inner_states": [], "aux_losses": {}, "values": {}}
        context = Context(
            coordinates=points.flatten(0, -2) if self.config.head_columns else None,  # (N, dims)
            return_values="encoder" in value_roles,
        )
        out = self.stack(h.flatten(1, -2).transpose(0, 1), context, keep_hidden=keep_hidden)
        extra = {"inner_states": out.hidden_states, "aux_losses": out.losses, "values": out.values}
        return self.final_norm(out.x).transpose(0, 1).unflatten(1, h.shape[1:-1]), extra


def coordinates(axis: Tensor, dims: int) -> Tensor:
    """The points of a grid with the same axis in every dimension.

    Args:
        axis: (n,), the coordinates along one side.
        dims: 1 or 2.

    Returns:
        (n, 1), or (n, n, 2): the row's coordinate, then the column's.
    """
    return torch.stack(torch.meshgrid(*[axis] * dims, indexing="ij"), dim=-1)


def without_edge(u: Tensor) -> Tensor:
    """u (B, m) or (B, m, m), 0 at the first and last points of each dimension."""
    inner = torch.zeros_like(u[0])
    inner[(slice(1, -1),) * inner.dim()] = 1
    return u * inner
