"""One small client per engine protocol, all behind `base.Engine`."""
