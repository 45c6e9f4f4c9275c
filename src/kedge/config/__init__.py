"""Configuration: one table of settings, and where each value comes from."""

from kedge.config.loading import Config, Source, Value, load_config, mask, mask_url, masked
from kedge.config.places import CONFIG_PATH, config_path, data_folder, store_file, store_url
from kedge.config.table import SETTINGS, Setting

__all__ = [
    "CONFIG_PATH",
    "SETTINGS",
    "Config",
    "Setting",
    "Source",
    "Value",
    "config_path",
    "data_folder",
    "load_config",
    "mask",
    "mask_url",
    "masked",
    "store_file",
    "store_url",
]
