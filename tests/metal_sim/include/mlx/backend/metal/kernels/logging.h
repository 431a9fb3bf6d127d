#pragma once
// Logging from a kernel is not simulated.
