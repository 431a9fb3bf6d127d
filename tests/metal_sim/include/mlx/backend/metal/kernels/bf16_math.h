#pragma once
// bfloat math is part of msl/math.h.
