"""Configuration: the table of settings, and the sources of their values."""

from kedge.config.loader import (
    CONFIG_ENV,
    Config,
    SettingValue,
    Source,
    config_path,
    data_dir,
    load_config,
    mask,
    mask_url,
    mask_value,
    store_file,
    store_url,
)
from kedge.config.settings import SETTINGS, Setting

__all__ = [
    "CONFIG_ENV",
    "SETTINGS",
    "Config",
    "Setting",
    "SettingValue",
    "Source",
    "config_path",
    "data_dir",
    "load_config",
    "mask",
    "mask_url",
    "mask_value",
    "store_file",
    "store_url",
]
