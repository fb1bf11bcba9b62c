"""The binding to libcupti: which library, what is called with what, and which error each answer becomes."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from joulemark.collect import cupti as binding
from joulemark.collect import cupti_structs as c
from joulemark.collect.cupti import Cupti, find_library, loaded_libraries, translate
from joulemark.collect.cupti_device import COMPUTE_SET, CuptiDevice, MetricHost, Sampler, SamplingSettings
from joulemark.errors import (
    ConfigurationError,
    CountersBusy,
    CountersOverflow,
    CountersUnavailable,
    CountersUnreadable,
    DeviceError,
    NotPermitted,
    NotSupported,
)

NAMES = {0: b"CUPTI_SUCCESS", 1: b"CUPTI_ERROR_INVALID_PARAMETER", 35: b"CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"}


class FakeLibrary:
    """libcupti as ctypes gives it: it checks sizes as the real one does, and holds samples of two metrics."""

    def __init__(self, version: int = 130001, samples: int = 10, answers: dict[str, int] | None = None):
        self.version, self.samples, self.answers = version, samples, answers or {}
        self.calls: list[str] = []
        self.given: dict[str, dict[str, object]] = {}
        self.names: dict[str, list[bytes]] = {}
        self.objects = 0
        self.in_image: list[int] = []
        self.image_samples = 0

    def cuptiGetVersion(self, number):
        number._obj.value = self.version
        return self.answers.get("cuptiGetVersion", 0)

    def cuptiGetResultString(self, code, text):
        text._obj.value = NAMES.get(code, b"CUPTI_ERROR_UNKNOWN")
        return 0

    def __getattr__(self, function: str):
        if not function.startswith("cupti"):
            raise AttributeError(function)

        def call(struct) -> int:
            given = struct._obj
            self.calls.append(function)
            self.given[function] = {field[0]: getattr(given, field[0]) for field in given._fields_}
            name = type(given).__name__
            if given.structSize != c.struct_size(c.structure(name, self.version)):
                return 1
            if code := self.answers.get(function, 0):
                return code
            getattr(self, f"_{function}", lambda _: None)(given)
            return 0

        return call

    def _cuptiDeviceGetChipName(self, given):
        given.pChipName = b"GH100"

    def _cuptiProfilerDeviceSupported(self, given):
        given.isSupported = given.architecture = 3

    def _cuptiProfilerHostGetSupportedChips(self, given):
        given.numChips, given.ppChipNames = 1, (ctypes.c_char_p * 1)(b"GH100")

    def _cuptiProfilerHostInitialize(self, given):
        self.objects += 1
        given.pHostObject = 100 + self.objects

    def _cuptiProfilerHostDeinitialize(self, given):
        self.objects -= 1

    def _cuptiProfilerHostGetBaseMetrics(self, given):
        names = [b"cycles", b"ratio", b"throughput"][given.metricType]
        given.numMetrics, given.ppMetricNames = 1, (ctypes.c_char_p * 1)(names)

    def _cuptiProfilerHostConfigAddMetrics(self, given):
        self.names["config"] = [given.ppMetricNames[i] for i in range(given.numMetrics)]

    def _cuptiProfilerHostGetConfigImageSize(self, given):
        given.configImageSize = 5

    def _cuptiProfilerHostGetConfigImage(self, given):
        ctypes.memmove(given.pConfigImage, b"a\0b\0c", 5)

    def _cuptiProfilerHostGetNumOfPasses(self, given):
        assert ctypes.string_at(given.pConfigImage, given.configImageSize) == b"a\0b\0c"
        given.numOfPasses = 1 if len(self.names["config"]) < 3 else 2

    def _cuptiPmSamplingEnable(self, given):
        given.pPmSamplingObject = 77

    def _cuptiPmSamplingSetConfig(self, given):
        assert ctypes.string_at(given.pConfig, given.configSize) == b"a\0b\0c"

    def _cuptiPmSamplingGetCounterDataSize(self, given):
        self.image_samples, given.counterDataSize = given.maxSamples, 64

    def _cuptiPmSamplingCounterDataImageInitialize(self, given):
        self.in_image = []

    def _cuptiPmSamplingDecodeData(self, given):
        done = self.given.setdefault("decoded", {"n": 0})
        self.in_image = list(range(done["n"], min(done["n"] + self.image_samples, self.samples)))
        done["n"] += len(self.in_image)
        full = done["n"] < self.samples
        given.decodeStopReason = c.STOP_COUNTER_DATA_FULL if full else c.STOP_END_OF_RECORDS
        given.overflow = self.answers.get("overflow", 0)

    def _cuptiPmSamplingGetCounterDataInfo(self, given):
        given.numCompletedSamples = len(self.in_image)

    def _cuptiPmSamplingCounterDataGetSampleInfo(self, given):
        given.startTimestamp = 1000 + 10 * self.in_image[given.sampleIndex]
        given.endTimestamp = given.startTimestamp + 10

    def _cuptiProfilerHostEvaluateToGpuValues(self, given):
        for column in range(given.numMetrics):
            given.pMetricValues[column] = self.in_image[given.rangeIndex] + 0.5 * column


def cupti(**options) -> Cupti:
    return Cupti(FakeLibrary(**options), Path("/lib/libcupti.so.13"))


@pytest.fixture
def no_driver(monkeypatch):
    """cuInit of a driver that is there."""

    class Driver:
        def cuInit(self, flags):
            return 0

    monkeypatch.setattr(binding.ctypes, "CDLL", lambda name: Driver())


class TestErrors:
    @pytest.mark.parametrize(
        ("function", "code", "kind"),
        [
            ("cuptiPmSamplingEnable", 35, NotPermitted),
            ("cuptiPmSamplingEnable", 40, NotPermitted),
            ("cuptiPmSamplingSetConfig", 35, NotPermitted),
            ("cuptiPmSamplingEnable", 7, CountersBusy),
            ("cuptiPmSamplingEnable", 26, CountersBusy),
            ("cuptiPmSamplingEnable", 27, NotSupported),
            ("cuptiProfilerHostInitialize", 46, NotSupported),
            ("cuptiDeviceGetChipName", 43, NotSupported),
            ("cuptiProfilerInitialize", 15, CountersUnavailable),
            ("cuptiPmSamplingDecodeData", 999, CountersUnreadable),
            ("cuptiPmSamplingDecodeData", 8, CountersOverflow),
            ("cuptiPmSamplingSetConfig", 27, CountersUnreadable),
            ("cuptiPmSamplingStart", 7, DeviceError),
        ],
    )
    def test_every_cause_has_its_type(self, function, code, kind):
        error = translate(function, code, "TEXT")
        assert type(error) is kind
        assert f"{function} answered TEXT ({code})" in str(error)

    def test_permission_names_the_drivers_option(self):
        assert "NVreg_RestrictProfilingToAdminUsers=0" in translate("cuptiPmSamplingEnable", 35, "TEXT").remedy

    def test_the_answer_of_a_call_is_told_in_cuptis_words(self):
        with pytest.raises(NotPermitted, match="CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"):
            cupti(answers={"cuptiDeviceGetChipName": 35}).chip(0)


class TestLibrary:
    def test_the_loaded_one_is_found_in_the_maps(self, tmp_path):
        maps = tmp_path / "maps"
        maps.write_text("7f-8f r-xp 00000000 08:01 42  /a b/libcupti.so.13\n7f-8f r-xp 0 08:01 1  /lib/libc.so.6\n")
        assert loaded_libraries(maps) == (Path("/a b/libcupti.so.13"),)
        maps.write_text("7f-8f r-xp 00000000 08:01 1  /lib/libc.so.6\n")
        assert loaded_libraries(maps) == ()
        assert loaded_libraries(tmp_path / "none") == ()

    @pytest.fixture
    def folder(self, tmp_path):
        library = tmp_path / "nvidia" / "cu13" / "lib" / "libcupti.so.13"
        library.parent.mkdir(parents=True)
        library.touch()
        return tmp_path

    def test_a_folder_of_pip_is_searched(self, folder, monkeypatch):
        monkeypatch.setattr(binding, "loaded_libraries", lambda: ())
        found = find_library(str(folder))
        assert found == (folder / "nvidia/cu13/lib/libcupti.so.13").resolve()
        assert find_library(str(found)) == found

    def test_another_than_the_loaded_one_is_refused(self, folder, monkeypatch):
        other = folder / "libcupti.so.12"
        other.touch()
        monkeypatch.setattr(binding, "loaded_libraries", lambda: (other,))
        with pytest.raises(CountersUnavailable, match="already loaded") as caught:
            find_library(str(folder / "nvidia"))
        assert "before torch is imported" in caught.value.remedy
        assert find_library(str(other)) == other.resolve()
        assert find_library() == other

    def test_one_that_torch_loads_beside_the_named_one_is_no_obstacle(self, folder, monkeypatch):
        torchs = folder / "torchs" / "libcupti.so.13"
        torchs.parent.mkdir()
        torchs.touch()
        named = folder / "nvidia/cu13/lib/libcupti.so.13"
        monkeypatch.setattr(binding, "loaded_libraries", lambda: (torchs, named))
        assert find_library(str(named)) == named.resolve()

    def test_of_several_loaded_the_first_that_came_is_used(self, tmp_path):
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler")
        (tmp_path / "one.c").write_text("int cuptiGetVersion(unsigned *v) { *v = 130001; return 0; }")
        for name in ("later", "first"):
            (tmp_path / name).mkdir()
            library = tmp_path / name / "libcupti.so.99"
            command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcupti.so.99", "one.c", "-o", str(library)]
            subprocess.run(command, cwd=tmp_path, check=True)
        code = (
            "import ctypes, sys; from joulemark.collect.cupti import find_library, loaded_libraries\n"
            "for path in sys.argv[1:]: ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)\n"
            "print(len(loaded_libraries()), find_library())"
        )
        paths = [str(tmp_path / name / "libcupti.so.99") for name in ("first", "later")]
        for order in (paths, paths[::-1]):
            child = subprocess.run([sys.executable, "-c", code, *order], capture_output=True, text=True, check=True)
            assert child.stdout.split() == ["2", order[0]]

    def test_a_name_without_a_library_is_the_users_error(self, tmp_path):
        with pytest.raises(ConfigurationError, match="no libcupti at"):
            find_library(str(tmp_path))
        with pytest.raises(ConfigurationError, match="no libcupti at"):
            find_library(str(tmp_path / "libcupti.so.13"))

    def test_none_at_all_is_told(self, monkeypatch):
        monkeypatch.setattr(binding, "loaded_libraries", lambda: ())
        monkeypatch.setattr(binding, "_installed", lambda: None)
        with pytest.raises(CountersUnavailable, match="no libcupti is installed"):
            find_library()

    def test_a_broken_file_is_told(self, folder, monkeypatch):
        monkeypatch.setattr(binding, "loaded_libraries", lambda: ())
        with pytest.raises(CountersUnavailable, match="cannot be loaded"):
            binding.load_library(str(folder))

    def test_one_too_old_is_told(self):
        with pytest.raises(CountersUnavailable, match=r"no PM sampling \(API version 23\)"):
            cupti(version=23)

    def test_one_that_does_not_start_is_told(self):
        with pytest.raises(CountersUnavailable, match="does not start"):
            cupti(answers={"cuptiGetVersion": 999})

    @pytest.mark.parametrize(("number", "text"), [(130001, "13.0.1"), (130401, "13.4.1"), (28, "API 28")])
    def test_versions_read_as_people_write_them(self, number, text):
        assert cupti(version=number).version == text


class TestMetricHost:
    def test_all_kinds_of_metrics_are_known(self):
        with MetricHost(cupti(), "GH100") as host:
            assert host.base_metrics() == {"cycles", "ratio", "throughput"}

    def test_an_image_with_zeros_inside_stays_whole(self):
        with MetricHost(one := cupti(), "GH100") as host:
            image = host.config_image(["cycles.sum", "ratio"])
            assert image == b"a\0b\0c"
            assert host.passes(image) == 1
        assert one._library.names["config"] == [b"cycles.sum", b"ratio"]
        assert one._library.objects == 0

    @pytest.mark.parametrize("version", [130001, 130202])
    def test_the_set_is_named_where_the_library_can(self, version):
        one = cupti(version=version)
        MetricHost(one, "GH100", COMPUTE_SET if one.names_sets else None).close()
        given = one._library.given["cuptiProfilerHostInitialize"]
        assert given.get("pSinglePassMetricSetName") == (b"TriageCompute" if version == 130202 else None)


class TestSampler:
    def sampler(self, image_samples=16, **options) -> tuple[Sampler, FakeLibrary]:
        one = cupti(**options)
        settings = SamplingSettings(interval=50_000, image_samples=image_samples)
        return Sampler(one, 0, MetricHost(one, "GH100"), ("cycles.sum", "ratio"), settings), one._library

    def test_samples_are_read_by_one_decoding(self):
        sampler, library = self.sampler(image_samples=16)
        sampler.start()
        sampler.stop()
        got = sampler.read()
        assert library.calls.count("cuptiPmSamplingDecodeData") == 1
        assert list(got.start) == [1000 + 10 * i for i in range(10)]
        assert list(got.end) == [1010 + 10 * i for i in range(10)]
        assert np.array_equal(got.values, [[i, i + 0.5] for i in range(10)])
        assert got.overflow is False

    def test_an_image_that_ran_full_is_an_overflow(self):
        sampler, library = self.sampler(image_samples=4)
        assert sampler.read().overflow is True
        assert library.calls.count("cuptiPmSamplingDecodeData") == 1

    def test_the_configuration_says_interval_and_trigger(self):
        _, library = self.sampler()
        given = library.given["cuptiPmSamplingSetConfig"]
        assert (given["samplingInterval"], given["triggerMode"], given["hwBufferAppendMode"]) == (50_000, 1, 0)
        assert given["configSize"] == 5

    def test_nothing_sampled_is_an_empty_answer(self):
        sampler, _ = self.sampler(samples=0)
        assert sampler.read().values.shape == (0, 2)

    def test_an_overflow_is_told(self):
        sampler, _ = self.sampler(answers={"overflow": 1})
        assert sampler.read().overflow is True

    def test_the_counters_are_given_back_once(self):
        sampler, library = self.sampler()
        sampler.close()
        sampler.close()
        assert library.calls.count("cuptiPmSamplingDisable") == 1
        assert library.objects == 0

    @pytest.mark.parametrize(
        ("function", "disabled"),
        [("cuptiPmSamplingEnable", 0), ("cuptiPmSamplingSetConfig", 1), ("cuptiPmSamplingGetCounterDataSize", 1)],
    )
    def test_a_refusal_half_way_leaves_nothing_behind(self, function, disabled):
        one = cupti(answers={function: 35})
        with pytest.raises(NotPermitted):
            Sampler(one, 0, MetricHost(one, "GH100"), ("cycles.sum",), SamplingSettings())
        assert one._library.calls.count("cuptiPmSamplingDisable") == disabled
        assert one._library.objects == 0


@pytest.mark.usefixtures("no_driver")
class TestDevice:
    def test_a_chip_is_asked_for_what_fits(self):
        device = CuptiDevice(cupti(), 0)
        assert (device.chip, device.library) == ("GH100", "13.0.1")
        assert device.fits(["cycles.sum", "ratio"], None)
        assert not device.fits(["a", "b", "c"], None)
        assert device.metric_sets() == (None,)

    def test_metrics_that_the_library_refuses_do_not_fit(self):
        device = CuptiDevice(cupti(answers={"cuptiProfilerHostConfigAddMetrics": 1}), 0)
        assert not device.fits(["cycles.sum"], None)

    def test_a_newer_library_offers_its_set_first(self):
        assert CuptiDevice(cupti(version=130401), 0).metric_sets() == (COMPUTE_SET, None)

    def test_a_configuration_without_pm_sampling_says_what_is_in_the_way(self):
        library = FakeLibrary()
        library._cuptiProfilerDeviceSupported = lambda given: (
            [setattr(given, name, 3) for name in ("architecture", "sli", "confidentialCompute", "cmp", "wsl")]
            + [setattr(given, "vGpu", 2), setattr(given, "isSupported", 1)]
        )
        with pytest.raises(NotSupported, match="vGpu disabled by the system"):
            CuptiDevice(Cupti(library, Path("/lib/libcupti.so.13")), 0)

    def test_a_sampler_of_a_device_samples(self):
        sampler = CuptiDevice(cupti(), 0).sampler(("cycles.sum", "ratio"), None, SamplingSettings())
        assert len(sampler.read().start) == 10
        sampler.close()


def test_without_a_driver_nothing_is_asked_of_the_device(monkeypatch):
    def missing(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(binding.ctypes, "CDLL", missing)
    one = cupti()
    with pytest.raises(CountersUnavailable, match="the CUDA driver cannot be loaded"):
        CuptiDevice(one, 0)
    assert one._library.calls == []
