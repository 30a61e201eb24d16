"""The code blocks of README.md and docs/*.md on a GPU, those that need one too."""

import pytest

from tests.docs_pages import WITH_CODE, run_page

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_blocks_run(page, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path, has_gpu=True)
