"""The official files of PCFG SET, and the parser of their pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from data_prep.dataset import DataError, Json, Pair
from data_prep.pcfg.language import count_functions, interpret
from data_prep.sources import OfficialFile, OfficialFiles
from data_prep.text import shorten, split_lines

BASE_URL = (
    "https://raw.githubusercontent.com/i-machine-think/am-i-compositional/"
    "4f75bdd78889150dd78e90bbb7ddec840204c159/data/pcfgset"
)
OFFICIAL = (
    OfficialFile("pcfgset/train.src", None, None, git_blob="2d5deb5423bbc442dec018b8149f906d7b4d8023"),
    OfficialFile("pcfgset/train.tgt", 2_742_789, "3fa13c7ca2f3fb8dce126612d77f6666fb49f541c0936aa55c88cd033693475a"),
    OfficialFile("pcfgset/dev.src", 438_284, "67bd466f77b7acb9863ddbbbacb4784848bdfb9094c40e2f94955aff7cb75d0a"),
    OfficialFile("pcfgset/dev.tgt", 164_248, "95648e697cb86a8724d71d6e841f37eea27d15951091b134538906bfbf0d14d1"),
    OfficialFile("pcfgset/test.src", 863_344, "65af9357dc169a22629456be7cf43e97e275e076db10d72202d5389be7d8c0b2"),
    OfficialFile("pcfgset/test.tgt", 321_669, "7d23524995eb28a4726b3f1ffc11daec8f13692f7f804f4be20ca1a25c941517"),
    OfficialFile("systematicity/train.src", None, None, git_blob="77f60c1bb8b583cfef6144f1de04d3d62b6b57f4"),
    OfficialFile(
        "systematicity/train.tgt", 2_589_979, "5b8911aac24433e1a32e769e4ae237ace7e599352f8c4783334f9cae4de53b98"
    ),
    OfficialFile(
        "systematicity/test.src", 1_235_202, "9c47ccf869899e65c2c2cf530403c8fefdcb5de57787c9ff029dc7d9b8018941"
    ),
    OfficialFile("systematicity/test.tgt", 474_479, "2896474cdeb151929bd85ed10aeeca37866e11dafa00f62e1660804f0dfc5a8a"),
    OfficialFile("productivity/train.src", None, None, git_blob="299b8b8b6cbaf9381ee5a8b5bb58ade3dfbaa5d1"),
    OfficialFile(
        "productivity/train.tgt", 2_444_044, "604b73127083b9dc6f6331be6722423d2344eac36278e48d658618f0e78a8da9"
    ),
    OfficialFile(
        "productivity/test.src", 1_930_144, "ba03bc5c468e955d537c06ca02c900c431a16f37b8b3f02e5eaa8a93434a3f73"
    ),
    OfficialFile("productivity/test.tgt", 620_414, "55704b1e887ffeffb104fc1ba4bc44dd6b0e95e34a355bd07d86881fd226a254"),
    OfficialFile("substitutivity/primitive/train.src", None, None, git_blob="c3a5fd6c73b67e76884e7c3bea69efa0c037dda3"),
    OfficialFile(
        "substitutivity/primitive/train.tgt",
        2_748_925,
        "eb5e426d23e6b39bcded649c37bc28c19774cfe2517123d1335d5648d36f9559",
    ),
    OfficialFile(
        "substitutivity/primitive/test.src",
        1_073_727,
        "21a135fb2e7c828bc264d467fd2353a51a411bffa20416c381290bce500e7899",
    ),
    OfficialFile(
        "substitutivity/primitive/test.tgt", 392_456, "71c5545a9fed0792389b18d470d78c310d578cdf4fa09913f481983f5dbdd29d"
    ),
    OfficialFile(
        "substitutivity/primitive/test_twin.src",
        1_139_517,
        "b6111cb54df3f9c44bca73ee97a89006e8dc1fae91803017203ce5623ffe1e40",
    ),
    OfficialFile(
        "substitutivity/primitive/test_twin.tgt",
        392_456,
        "71c5545a9fed0792389b18d470d78c310d578cdf4fa09913f481983f5dbdd29d",
    ),
    OfficialFile(
        "substitutivity/equally_distributed/train.src", None, None, git_blob="a7bf10892b281a32e680a68c5e0a7006e983a32a"
    ),
    OfficialFile(
        "substitutivity/equally_distributed/train.tgt",
        2_742_788,
        "2a451e0ad648f1801de3fe320dfa5be96249616bb3ce0e66e8c4a027206eddc5",
    ),
    OfficialFile(
        "substitutivity/equally_distributed/test.src",
        1_073_727,
        "21a135fb2e7c828bc264d467fd2353a51a411bffa20416c381290bce500e7899",
    ),
    OfficialFile(
        "substitutivity/equally_distributed/test.tgt",
        392_456,
        "71c5545a9fed0792389b18d470d78c310d578cdf4fa09913f481983f5dbdd29d",
    ),
    OfficialFile(
        "substitutivity/equally_distributed/test_twin.src",
        1_139_517,
        "b6111cb54df3f9c44bca73ee97a89006e8dc1fae91803017203ce5623ffe1e40",
    ),
    OfficialFile(
        "substitutivity/equally_distributed/test_twin.tgt",
        392_456,
        "71c5545a9fed0792389b18d470d78c310d578cdf4fa09913f481983f5dbdd29d",
    ),
    OfficialFile(
        "localism/unrolled_test.tsv", 3_149_699, "8327c896920472a2a03d5d82b9a6f918d37badb18e79c973b5de04a1e24a0c3f"
    ),
    OfficialFile(
        "localism/increasing_string_length/increasing_length.src",
        540_825,
        "ec342fbc5841aa1770eeba4db97820cc70dcdc6c1a727d411adf411174d321c7",
    ),
    OfficialFile(
        "localism/increasing_string_length/increasing_length.tgt",
        461_142,
        "68a8663013caa3032cf9bcbfb260d1289ce7c386c5e7c48d4d2217bb9647b243",
    ),
    OfficialFile(
        "overgeneralisation/train_pcfg_ratio=0.0001.src",
        None,
        None,
        git_blob="6e2f316f4d8f093b28eee5770bd3f9d1ece4dc95",
    ),
    OfficialFile(
        "overgeneralisation/train_pcfg_ratio=0.0001.tgt",
        2_674_673,
        "4afd8d3aa98764b0242ae4608eb17bb534f2e575102916a785739a25fd47f3eb",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.0001_exception.src",
        576,
        "30ec0fb2b6a353db6c4eb9afcf2cd13fa356d92e360fd9bc334c02783086bd39",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.0001_exception.tgt",
        219,
        "bf2466a1ebd2966d5409ba8bf57fa5ff13d9594f342f596478f2b1369759cac4",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.0001_original.src",
        576,
        "30ec0fb2b6a353db6c4eb9afcf2cd13fa356d92e360fd9bc334c02783086bd39",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.0001_original.tgt",
        251,
        "04745bd663c4746cfb06d9df4d92916fea8b8d4639ee6b8ffc7cd4ee1e1dd340",
    ),
    OfficialFile(
        "overgeneralisation/train_pcfg_ratio=0.0005.src",
        None,
        None,
        git_blob="e97644650cc9fdc7582c59c665c944ba8d640e87",
    ),
    OfficialFile(
        "overgeneralisation/train_pcfg_ratio=0.0005.tgt",
        2_675_957,
        "96af4e2b193a5ce491407a7fc784f13b58c8f98ca876369a787170033198ffeb",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.0005_exception.src",
        3_702,
        "f8af90fd9540c4ea238d5a85ec36ead1c83a51bdf92cb75e6b20f012aee76f9e",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.0005_exception.tgt",
        1_503,
        "2443a3538aebeebc6f778463feb055b9eb5abe7259ad2c77013641dbdea6b101",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.0005_original.src",
        3_702,
        "f8af90fd9540c4ea238d5a85ec36ead1c83a51bdf92cb75e6b20f012aee76f9e",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.0005_original.tgt",
        1_498,
        "633055f94c6b7fa83224a1f8833a514e685b1cd92a743f4656751591a03e7a28",
    ),
    OfficialFile(
        "overgeneralisation/train_pcfg_ratio=0.001.src", None, None, git_blob="4a89829bd4628af4eb798af0fb25141d4cac9bc0"
    ),
    OfficialFile(
        "overgeneralisation/train_pcfg_ratio=0.001.tgt",
        2_677_810,
        "f9e8eaba38ba44a7bded6481d222201df2c0533987622c653975f5c2014d1f96",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.001_exception.src",
        8_279,
        "ec5f4bdf1fb4e76b24004c1e27fdc453fdd2576f1fcaab28c28dc17bb40bfc07",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.001_exception.tgt",
        3_356,
        "4b2dbe250003d0133c86209319b9a22c978a8b94cba59feda3d7e5ebb8822cd4",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.001_original.src",
        8_279,
        "ec5f4bdf1fb4e76b24004c1e27fdc453fdd2576f1fcaab28c28dc17bb40bfc07",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.001_original.tgt",
        3_496,
        "75536c3940f51457068c0ccbf66ab8e38b1f39325fff07aec3e963d4f6056c49",
    ),
    OfficialFile(
        "overgeneralisation/train_pcfg_ratio=0.005.src", None, None, git_blob="30f97072a615039237d35dd399137228b8c2dff4"
    ),
    OfficialFile(
        "overgeneralisation/train_pcfg_ratio=0.005.tgt",
        2_690_356,
        "cc776af6cb01aac332710da78a2ac6c4d2ab1aab20eae65900f4f0ea11a8417e",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.005_exception.src",
        37_197,
        "8d6587cb649ee4e48a3ecce4530fd6f17c4d6dc9d7d5a03788e08cf504ae4ed4",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.005_exception.tgt",
        15_902,
        "ca565b2b477c6c2c7adb0274aeefaeff9bd685e8fbfccc833053d8d904d874e9",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.005_original.src",
        37_197,
        "8d6587cb649ee4e48a3ecce4530fd6f17c4d6dc9d7d5a03788e08cf504ae4ed4",
    ),
    OfficialFile(
        "overgeneralisation/test_pcfg_ratio=0.005_original.tgt",
        15_511,
        "9ca7900be9df35f6aa4c4fc1284c7cd492cbd5f5011ff9ee7966426f9c51a303",
    ),
)
FILES = {file.path: file for file in OFFICIAL}
DEV = "pcfgset/dev"  # the same for every test
DEV_SIZE = 4_860
VOCABULARY, TOGETHER = (531, 520), 531
ENDS = ("src", "tgt")
Subsets = dict[str, list[Pair]]
Rewrite = Callable[[str], str]


def load(name: str, source: OfficialFiles, rewrite: Rewrite = str) -> list[Pair]:
    """Reads the pairs of two official files, NAME.src and NAME.tgt; see ``parse``. Raises DataError."""
    files = [FILES[f"{name}.{end}"] for end in ENDS]
    contents = [source.read(file) for file in files]
    pairs = parse(*(part for content in contents for part in content), rewrite)
    for file, (path, data) in zip(files, contents, strict=True):
        file.check(path, data)
    return pairs


def parse(
    source_path: Path, source_data: bytes, target_path: Path, target_data: bytes, rewrite: Rewrite = str
) -> list[Pair]:
    """Reads the pairs of two files with an expression, or its value, on each line.

    ``rewrite`` maps a source to the expression of the ten functions that it stands for (see ``pcfg.language``).

    Raises:
        DataError: with file and line, for a line that is not an expression, for a target that is not the value of its
            expression, and for different numbers of lines; see also ``text.split_lines``.
    """
    sources, targets = split_lines(source_path, source_data), split_lines(target_path, target_data)
    pairs = []
    for number, pair in enumerate(map(Pair, sources, targets), start=1):
        try:
            meant = interpret(rewrite(pair.source))
        except ValueError as error:
            raise DataError(str(error), source_path, number) from None
        if meant != pair.target:
            raise DataError(difference(pair.target, meant), target_path, number)
        pairs.append(pair)
    if len(sources) != len(targets):
        raise DataError(f"{len(targets):,} lines, but {source_path.name} has {len(sources):,}", target_path)
    return pairs


def difference(target: str, meant: str) -> str:
    """Describes the first difference between a target and the value of its expression."""
    found, expected = ([*text.split(" "), "the end"] for text in (target, meant))
    position = next(i for i, (one, other) in enumerate(zip(found, expected)) if one != other)
    word = shorten(found[position])
    return f"wrong target: word {position + 1} is {word}, but the expression means {expected[position]}"


def pair_files(names: Iterable[str]) -> list[str]:
    """The paths of the two files of every name."""
    return [f"{name}.{end}" for name in names for end in ENDS]


def describe(paths: Iterable[str]) -> Json:
    """The origin of data from these files, for ``dataset.json``."""
    return {"files": [{**FILES[path].describe(), "name": path} for path in paths]}


def function_counts(pairs: list[Pair]) -> list[str]:
    """The type of every example: the number of its functions, ``functions_01`` and so on."""
    return [f"functions_{count_functions(pair.source):02}" for pair in pairs]
