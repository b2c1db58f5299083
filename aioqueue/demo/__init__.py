"""The demo: the main job on real input, with every promise that it shows checked. Run by `python -m aioqueue demo`."""
