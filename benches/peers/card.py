"""What the card is doing: NVML through ctypes (a query takes well under a millisecond; nvidia-smi takes a second)."""

import ctypes

# nvmlClocksEventReasons of nvml.h. Idle says nothing about a run; the others do.
REASONS = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}


def reasons_text(bits):
    """Names of the set bits, "none" for 0."""
    names = [name for bit, name in REASONS.items() if bits & bit]
    rest = bits & ~sum(REASONS)
    return "+".join(names + ([hex(rest)] if rest else [])) or "none"


class Card:
    """One GPU by UUID (`GPU-...`). Raises OSError without NVML, RuntimeError when it refuses."""

    def __init__(self, uuid):
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))

    def _call(self, name, *args):
        code = getattr(self._nvml, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name} answered {code}")

    def _query(self, kind, name, *args):
        value = kind()
        self._call(name, self._device, *args, ctypes.byref(value))
        return value.value

    def busy(self):
        """The SM clock and what holds it back, asked while work is running."""
        bits = self._query(ctypes.c_ulonglong, "nvmlDeviceGetCurrentClocksThrottleReasons")
        return {"sm_mhz": self._query(ctypes.c_uint, "nvmlDeviceGetClockInfo", ctypes.c_uint(1)), "reasons": reasons_text(bits)}

    def state(self):
        """Clocks, power, temperature, energy since the driver was loaded and throttle reasons; null where refused."""
        queries = {
            "sm_mhz": (ctypes.c_uint, "nvmlDeviceGetClockInfo", ctypes.c_uint(1)),
            "memory_mhz": (ctypes.c_uint, "nvmlDeviceGetClockInfo", ctypes.c_uint(2)),
            "sm_max_mhz": (ctypes.c_uint, "nvmlDeviceGetMaxClockInfo", ctypes.c_uint(1)),
            "power_mw": (ctypes.c_uint, "nvmlDeviceGetPowerUsage"),
            "power_limit_mw": (ctypes.c_uint, "nvmlDeviceGetEnforcedPowerLimit"),
            "celsius": (ctypes.c_uint, "nvmlDeviceGetTemperature", ctypes.c_uint(0)),
            "energy_mj": (ctypes.c_ulonglong, "nvmlDeviceGetTotalEnergyConsumption"),
            "reasons": (ctypes.c_ulonglong, "nvmlDeviceGetCurrentClocksThrottleReasons"),
        }
        out = {}
        for key, (kind, name, *args) in queries.items():
            try:
                out[key] = self._query(kind, name, *args)
            except (RuntimeError, AttributeError):
                out[key] = None
        if out["reasons"] is not None:
            out["reasons"] = reasons_text(out["reasons"])
        return out

    def driver(self):
        """The driver's version."""
        text = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(96))
        return text.value.decode()
