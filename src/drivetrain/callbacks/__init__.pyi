# The public names, for type checkers and for base/lazy.py.

from drivetrain.callback import Callback as Callback
from drivetrain.callback import Checkpoint as Checkpoint
from drivetrain.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
from drivetrain.callbacks.early_stopping import EarlyStopping as EarlyStopping
from drivetrain.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
from drivetrain.callbacks.finetuning import BaseFinetuning as BaseFinetuning
from drivetrain.callbacks.goodput_monitor import GoodputMonitor as GoodputMonitor
from drivetrain.callbacks.gradient_accumulation import (
    GradientAccumulationScheduler as GradientAccumulationScheduler,
)
from drivetrain.callbacks.lambda_function import LambdaCallback as LambdaCallback
from drivetrain.callbacks.live_plot import LivePlot as LivePlot
from drivetrain.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
from drivetrain.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
from drivetrain.callbacks.model_summary import ModelSummary as ModelSummary
from drivetrain.callbacks.non_finite import TerminateOnNaN as TerminateOnNaN
from drivetrain.callbacks.notebook_progress import NotebookProgressBar as NotebookProgressBar
from drivetrain.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
from drivetrain.callbacks.plain_progress import PlainProgressBar as PlainProgressBar
from drivetrain.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
from drivetrain.callbacks.progress_bar import ProgressBar as ProgressBar
from drivetrain.callbacks.pruning import ModelPruning as ModelPruning
from drivetrain.callbacks.replay_check import ReplayCheck as ReplayCheck
from drivetrain.callbacks.replica_check import ReplicaCheck as ReplicaCheck
from drivetrain.callbacks.rich_model_summary import RichModelSummary as RichModelSummary
from drivetrain.callbacks.rich_progress import RichProgressBar as RichProgressBar
from drivetrain.callbacks.spike import SpikeDetection as SpikeDetection
from drivetrain.callbacks.stochastic_weight_avg import StochasticWeightAveraging as StochasticWeightAveraging
from drivetrain.callbacks.throughput_monitor import ThroughputMonitor as ThroughputMonitor
from drivetrain.callbacks.timer import Timer as Timer
from drivetrain.callbacks.tqdm_progress import TQDMProgressBar as TQDMProgressBar
from drivetrain.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
from drivetrain.callbacks.weight_averaging import WeightAveraging as WeightAveraging
from drivetrain.tuner.batch_size_finder import BatchSizeFinder as BatchSizeFinder
from drivetrain.tuner.lr_finder import LearningRateFinder as LearningRateFinder
