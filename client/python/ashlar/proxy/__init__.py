# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible proxy in front of several engines: `python -m ashlar.proxy`.

It sends each prompt to the engine that is expected to have its first token first, by what each engine's daemon has
cached and how busy it is.
"""
