# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration of the Python API reference. tools/docs runs it."""

project = "Ashlar"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["torch", "transformers", "vllm", "sglang", "prometheus_client", "msgspec", "aiohttp"]
html_theme = "alabaster"
html_theme_options = {"description": "Python API"}
