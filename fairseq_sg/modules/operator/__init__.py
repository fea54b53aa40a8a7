"""Parts of a model that maps functions on a grid to functions on a grid (Li et al. 2021; Cao 2021)."""

from fairseq_sg.modules.operator.decoder import SpectralDecoder
from fairseq_sg.modules.operator.resample import Downsampling, Upsampling
from fairseq_sg.modules.operator.scaling import FieldScaling
from fairseq_sg.modules.operator.spectral import SpectralLayer
