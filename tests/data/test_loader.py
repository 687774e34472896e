import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data import ArrayImages, Batch, BatchedViews, FolderImages, ImageSet, PairLoader, synthetic
from adasim.data.crops import UNIFORMS, CropDraws, crop_image, first_readable
from adasim.util import seeding
from adasim.util.errors import UserError

from .pictures import save_image, smooth

SMALL = ViewsConfig(size=16, local_crops=1, local_size=8, in_memory=False)
Folder = Callable[..., Path]


def open_loader(
    images: ImageSet, views: ViewsConfig = SMALL, workers: int = 0, **changes: float
) -> PairLoader:
    options = {"batch_size": 4, "seed": 3, "max_unreadable": 0.5, **changes}
    return PairLoader(images, views, workers=workers, **options)  # type: ignore[arg-type]


def shifted(n: int) -> Tensor:
    """Everyone's partner is the next image but one; image 0 is its own."""
    partners = (torch.arange(n) + 2) % n
    partners[0] = 0
    return partners


def assert_equal(a: list[Batch], b: list[Batch]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.partners, other.partners)
        assert all(torch.equal(x, y) for x, y in zip(one.views, other.views, strict=True))


@pytest.fixture(params=["memory", "one by one", "workers"])
def either(request: pytest.FixtureRequest) -> Iterator[PairLoader]:
    views = ViewsConfig(size=16, local_crops=1, local_size=8, in_memory=request.param == "memory")
    workers = 2 if request.param == "workers" else 0
    loader = open_loader(ArrayImages("arrays", smooth(18, 20, 20)), views, workers)
    yield loader
    loader.close()


def test_a_batch_holds_the_querys_view_1_and_the_partners_view_2_under_the_querys_name(
    folder: Folder,
) -> None:
    images, views = FolderImages(folder(10)), BatchedViews(SMALL)
    partners = shifted(10)
    order = seeding.permutation(3, "order", 5, 10)
    for step, batch in enumerate(open_loader(images).epoch(5, partners)):
        assert torch.equal(batch.ids, order[4 * step : 4 * step + 4])
        assert torch.equal(batch.partners, partners[batch.ids])
        for number, view in enumerate(batch.views, start=1):
            settings = views.settings[number]
            draws = CropDraws(settings, seeding.uniform(3, f"view{number}", 5, batch.ids, UNIFORMS))
            shown = [images.load(i) for i in (batch.partners if number == 2 else batch.ids).tolist()]
            boxes = [draws.box(row, *image.shape[-2:]) for row, image in enumerate(shown)]
            cut = [crop_image(image, settings, box) for image, box in zip(shown, boxes, strict=True)]
            assert torch.equal(view, views.of_crops(torch.stack(cut), number, 3, 5, batch.ids))
    assert step == 1  # two images are left over and dropped


def test_images_in_memory_are_shown_under_the_same_names() -> None:
    array = smooth(18, 20, 20)
    views = ViewsConfig(size=16)
    for batch in open_loader(ArrayImages("arrays", array), views).epoch(2, shifted(18)):
        assert torch.equal(batch.views[0], BatchedViews(views)(array[batch.ids], 1, 3, 2, batch.ids))
        assert torch.equal(batch.views[1], BatchedViews(views)(array[batch.partners], 2, 3, 2, batch.ids))


def test_any_number_of_workers_gives_the_same_bits(folder: Folder) -> None:
    images = FolderImages(folder(14))
    Path(images.where(3)).write_bytes(b"<html>")
    runs = []
    for workers in (0, 1, 2):
        torch.set_num_threads(2 if workers == 0 else 1)
        loader = open_loader(images, workers=workers)
        state = torch.get_rng_state()
        runs.append([b for e in (0, 1) for b in loader.epoch(e, shifted(14))])
        assert torch.equal(torch.get_rng_state(), state)  # the training loop's generator is its own
        assert list(loader.quarantined) == [3]
        loader.close()
    assert_equal(runs[0], runs[1])
    assert_equal(runs[0], runs[2])


def test_an_epoch_from_step_s_on_is_the_tail_of_the_whole_epoch(either: PairLoader) -> None:
    whole = list(either.epoch(1, shifted(18)))
    assert len(whole) == either.steps_per_epoch == 4
    for start in range(5):
        assert_equal(list(either.epoch(1, shifted(18), start)), whole[start:])


def test_an_epoch_left_in_the_middle_does_no_harm(either: PairLoader) -> None:
    whole = list(either.epoch(1, shifted(18)))
    next(iter(either.epoch(0, shifted(18))))
    assert_equal(list(either.epoch(1, shifted(18))), whole)


def test_fetching_partners_late_gives_the_pixels_of_the_whole_batch(either: PairLoader) -> None:
    whole = list(either.epoch(1, shifted(18)))
    for late, full in zip(either.epoch(1, None), whole, strict=True):
        assert torch.equal(late.views[0], full.views[0])
        assert torch.equal(late.views[1], full.views[2])  # the local crop
        assert torch.equal(either.fetch(1, full.ids, full.partners)(), full.views[1])


def test_two_ranks_share_the_batches_of_one() -> None:
    images = synthetic(20)
    views = ViewsConfig(size=16)
    whole = list(open_loader(images, views).epoch(0, shifted(20)))
    parts = [list(open_loader(images, views, rank=r, world=2).epoch(0, shifted(20))) for r in (0, 1)]
    for full, *halves in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([h.ids for h in halves]), full.ids)
        assert torch.equal(torch.cat([h.views[1] for h in halves]), full.views[1])


@pytest.mark.parametrize("in_memory", [False, True])
def test_an_unreadable_image_is_replaced_by_a_rule_and_quarantined(tmp_path: Path, in_memory: bool) -> None:
    for i in range(12):
        save_image(smooth(1, 20, 20, seed=i)[0], tmp_path / f"{i:02d}.png")
    images = FolderImages(tmp_path)
    first = seeding.key(3, "stand-in", 7, 0) % 12
    broken = {7, first}  # the stand-in is broken too: the rule moves on
    for i in broken:
        (tmp_path / f"{i:02d}.png").write_bytes(b"")
    expected = seeding.key(3, "stand-in", 7, 1) % 12
    assert expected not in broken
    pixels, failed = first_readable(images, 7, 3, images.load)
    assert torch.equal(pixels, images.load(expected))
    assert set(failed) == broken

    config = ViewsConfig(size=16, in_memory=in_memory)
    loader = open_loader(images, config)
    partners = torch.full((12,), 7)  # drawn as a partner by everyone
    batch = next(iter(loader.epoch(0, partners)))
    repaired = ArrayImages(
        "repaired", torch.stack([first_readable(images, i, 3, images.load)[0] for i in range(12)])
    )
    assert torch.equal(batch.views[1], next(iter(open_loader(repaired, config).epoch(0, partners))).views[1])
    assert broken <= set(loader.quarantined)
    assert str(tmp_path / "07.png") in loader.quarantined[7]


def test_too_many_unreadable_images_stop_the_run_and_are_named(folder: Folder) -> None:
    root = folder(12)
    images = FolderImages(root)
    for i in (2, 5):
        (root / f"img{i:03d}.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"2 of 12 images .*img002\.png.*img005\.png.*--data.max-unreadable"):
        list(open_loader(images, max_unreadable=0.1).epoch(0, torch.arange(12)))


def test_a_signal_to_the_whole_group_does_not_take_the_workers_away(folder: Folder) -> None:
    images = FolderImages(folder(40))
    loader = open_loader(images, workers=1)
    whole = list(open_loader(images).epoch(0, torch.arange(40)))
    batches = iter(loader.epoch(0, torch.arange(40)))
    seen = [next(batches)]
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(loader.pids[0], number)
    assert_equal([*seen, *batches], whole)
    loader.close()


def test_small_images_of_one_size_are_kept_in_memory(tmp_path: Path, folder: Folder) -> None:
    auto = ViewsConfig(size=16)
    assert open_loader(synthetic(20), auto).in_memory
    assert not open_loader(synthetic(20, size=65), auto).in_memory
    assert not open_loader(FolderImages(folder(6)), auto).in_memory
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for i in range(6):
        save_image(smooth(1, 20, 20 + i // 5)[0], mixed / f"{i}.png")
    assert not open_loader(FolderImages(mixed), auto).in_memory
    (mixed / "5.png").unlink()
    assert open_loader(FolderImages(mixed), auto).in_memory


def test_a_batch_larger_than_the_data_set_is_refused() -> None:
    with pytest.raises(UserError, match="batch_size=30 is more than the 20 images"):
        open_loader(synthetic(20), batch_size=30)
